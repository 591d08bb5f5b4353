//! What a solution hands over so that others can see that it is optimal.

/// One of the two sides of the graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The rows of the matrix.
    Rows,
    /// The columns of the matrix.
    Cols,
}

/// Dual prices. Whoever trusts [`crate::verify`] need not trust the solver.
///
/// All integers are in ticks of 2^-`tick_exp`. For every vertex of the bidding side its profit is
/// the largest of weight less price over its allowed edges (and of `way_out`, where there is one).
/// No solution is worth more than all profits and prices together, each counted by its units; a
/// solution that is worth as much is optimal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Certificate {
    /// The side whose vertices have profits; the other one has prices.
    pub bidders: Side,
    /// Whether edges that lower the total were left out.
    pub optional: bool,
    /// Whether the smallest total was sought; the signs of all weights are then turned.
    pub minimize: bool,
    /// All weights are multiples of 2^-`grid_exp`, or were rounded to such.
    pub grid_exp: i32,
    /// Prices are multiples of 2^-`tick_exp`.
    pub tick_exp: i32,
    /// What every price is at least zero for: the vertices of the side that does not bid.
    pub prices: Vec<i128>,
    /// Profits of the bidders, up to one tick. A start for the next cycle; the checker computes
    /// its own.
    pub profits: Vec<i128>,
    /// Which bidder has each vertex of the other side, where both stand for one unit; for the next
    /// cycle, like `profits`.
    pub holders: Vec<Option<u32>>,
    /// What a bidder gains by staying unmatched: zero in optional mode; less than any number of
    /// edges can make up for where forbidden edges may keep bidders from being matched; absent
    /// where every bidder with an allowed edge is matched.
    pub way_out: Option<i128>,
}

/// What [`crate::verify`] found to hold.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Proof {
    /// Total weight.
    pub value: f64,
    /// No solution is better than this one by more than this. Zero when `exact`.
    pub gap: f64,
    /// Whether the solution is optimal for the very weights handed in.
    pub exact: bool,
    /// Number of matched units.
    pub matched: u64,
}
