//! Requests of a day, compressed: when each comes is fixed by a seed, so that every phase gets the
//! same; latency counts from the moment a request was due, not from when it could be sent.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// A request that takes longer counts as failed.
const GIVE_UP: Duration = Duration::from_secs(10);

/// The requests of one service over a day.
#[derive(Debug, Clone, Copy)]
pub(super) struct Curve {
    /// Requests per second at noon.
    pub(super) noon_per_s: f64,
    /// Length of the day.
    pub(super) day_s: f64,
    /// From when to when, as shares of the day, the rate is so many times what it would be.
    pub(super) burst: Option<(f64, f64, f64)>,
    /// Of the moments.
    pub(super) seed: u64,
}

impl Curve {
    /// Requests per second at a moment: a third of noon at midnight.
    pub(super) fn rate_at(&self, at_s: f64) -> f64 {
        let day = (at_s / self.day_s).clamp(0.0, 1.0);
        let sun = (std::f64::consts::PI * day).sin();
        let plain = self.noon_per_s * (0.33 + 0.67 * sun * sun);
        match self.burst {
            Some((from, to, times)) if (from..to).contains(&day) => plain * times,
            _ => plain,
        }
    }

    /// When the requests come, in seconds from the start: a Poisson process of this rate.
    pub(super) fn moments(&self) -> Vec<f64> {
        let most = self.noon_per_s * self.burst.map_or(1.0, |(_, _, times)| times.max(1.0));
        let mut state = self.seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        let mut draw = move || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            #[expect(clippy::cast_precision_loss, reason = "53 bits")]
            let uniform = ((state >> 11) as f64 + 0.5) / (1_u64 << 53) as f64;
            uniform
        };
        let (mut at, mut moments) = (0.0, Vec::new());
        loop {
            at -= draw().ln() / most;
            if at >= self.day_s {
                return moments;
            }
            if draw() * most < self.rate_at(at) {
                moments.push(at);
            }
        }
    }
}

/// What came of one request.
#[derive(Debug, Clone, Copy)]
pub(super) struct Asked {
    /// When it was due, in seconds from the start.
    pub(super) at_s: f64,
    /// How long it took.
    pub(super) latency_us: u64,
    /// It was answered with 200.
    pub(super) good: bool,
}

/// All that was asked of one service so far.
#[derive(Debug, Clone, Default)]
pub(super) struct Record(Arc<Mutex<Vec<Asked>>>);

impl Record {
    pub(super) fn all(&self) -> Vec<Asked> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn add(&self, asked: Asked) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(asked);
    }
}

async fn ask(to: SocketAddr) -> std::io::Result<bool> {
    let mut stream = tokio::net::TcpStream::connect(to).await?;
    stream.set_nodelay(true)?;
    stream.write_all(b"GET /infer HTTP/1.1\r\nHost: demo\r\nConnection: close\r\n\r\n").await?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await?;
    Ok(answer.starts_with(b"HTTP/1.1 200"))
}

/// A few requests that nobody counts.
pub(super) async fn warm_up(to: SocketAddr) {
    for _ in 0..20 {
        // One that fails is seen soon enough.
        drop(tokio::time::timeout(GIVE_UP, ask(to)).await);
    }
}

/// Asks a service as its curve says, from `start` on; ends when the last answer is there.
pub(super) async fn run(to: SocketAddr, curve: Curve, start: Instant, record: Record) {
    let mut under_way = tokio::task::JoinSet::new();
    for at_s in curve.moments() {
        let due = start + Duration::from_secs_f64(at_s);
        tokio::time::sleep_until(due.into()).await;
        let record = record.clone();
        under_way.spawn(async move {
            let good = tokio::time::timeout(GIVE_UP, ask(to)).await;
            let latency_us = u64::try_from(due.elapsed().as_micros()).unwrap_or(u64::MAX);
            record.add(Asked { at_s, latency_us, good: matches!(good, Ok(Ok(true))) });
        });
    }
    under_way.join_all().await;
}

/// A quantile of latencies, in milliseconds; none of none.
pub(super) fn quantile_ms(asked: impl IntoIterator<Item = Asked>, quantile: f64) -> Option<f64> {
    let mut all: Vec<u64> = asked.into_iter().map(|one| one.latency_us).collect();
    if all.is_empty() {
        return None;
    }
    all.sort_unstable();
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "counts of requests"
    )]
    let rank = ((all.len() as f64 * quantile).ceil() as usize).clamp(1, all.len());
    #[expect(clippy::cast_precision_loss, reason = "milliseconds")]
    Some(all[rank - 1] as f64 / 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_curve_is_a_day_with_a_burst_and_repeats() {
        let curve = Curve { noon_per_s: 30.0, day_s: 40.0, burst: Some((0.4, 0.5, 5.0)), seed: 7 };
        assert!(curve.rate_at(0.0) < 10.1 && curve.rate_at(20.1) > 29.0);
        assert!(curve.rate_at(17.0) > 4.9 * 0.9 * 30.0);
        let moments = curve.moments();
        assert_eq!(moments, curve.moments());
        assert!(moments.windows(2).all(|pair| pair[0] <= pair[1]));
        let in_burst = moments.iter().filter(|at| (16.0..20.0).contains(*at)).count();
        assert!((450..720).contains(&in_burst), "{in_burst}");
        assert!((1_000..1_700).contains(&moments.len()), "{}", moments.len());
    }

    #[test]
    fn quantiles_by_rank() {
        let asked = |ms: u64| Asked { at_s: 0.0, latency_us: ms * 1000, good: true };
        assert_eq!(quantile_ms((1..=100).map(asked), 0.99), Some(99.0));
        assert_eq!(quantile_ms((1..=100).map(asked), 0.5), Some(50.0));
        assert_eq!(quantile_ms([asked(3)], 0.99), Some(3.0));
        assert_eq!(quantile_ms([], 0.5), None);
    }
}
