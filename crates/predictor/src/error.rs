//! What can go wrong, by the operation that failed and its subject.

/// An error of the predictor.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum PredictorError {
    /// A measurement that cannot be used.
    #[error("{source_name}, line {line}: {problem}")]
    Measurement {
        /// The file as the caller named it.
        source_name: String,
        /// Counted from 1.
        line: u64,
        /// What is wrong, and what would be right.
        problem: String,
    },
    /// A whole file of measurements that cannot be used.
    #[error("{source_name}: {problem}")]
    Dataset {
        /// The file as the caller named it.
        source_name: String,
        /// What is wrong, and what would be right.
        problem: String,
    },
    /// Too little to learn from.
    #[error(
        "cannot train on {samples} samples of {workloads} workloads: at least {needed} samples of 3 workloads are needed"
    )]
    TooLittleData {
        /// How many there are.
        samples: usize,
        /// How many different workloads they name.
        workloads: usize,
        /// How many samples are needed.
        needed: usize,
    },
    /// Training gave numbers that are none.
    #[error(
        "training the {model} model diverged at {place}; lower the learning rate or check the data"
    )]
    Diverged {
        /// Which model.
        model: &'static str,
        /// Epoch or step.
        place: String,
    },
    /// A model file that cannot be loaded.
    #[error("cannot load the model: {problem}")]
    ModelFile {
        /// What is wrong, and what would be right.
        problem: String,
    },
}
