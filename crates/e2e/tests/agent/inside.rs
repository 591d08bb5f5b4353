//! How a test gets into an emulated node: it runs itself again in there.

use std::path::PathBuf;
use std::process::Command;

use muxflow_e2e::build::{client, products, xcuda};
use muxflow_e2e::default_signals;

/// Where the emulated GPU was built to.
fn emulated() -> PathBuf {
    if let Some(built) = std::env::var_os("MUXFLOW_EMULATED_BUILT") {
        return built.into();
    }
    products().to_owned()
}

fn child_program() -> PathBuf {
    products().join("muxflow-agent-child")
}

/// Runs the ignored test `name` inside an emulated node with one T4.
pub(crate) fn inside(name: &str) {
    Inside::new(name).run();
}

/// Runs the ignored test `name` inside an emulated node with these GPUs.
pub(crate) fn inside_with(gpus: &str, name: &str) {
    Inside { gpus: gpus.to_owned(), ..Inside::new(name) }.run();
}

/// An ignored test that is to run inside an emulated node.
pub(crate) struct Inside {
    name: String,
    gpus: String,
    variables: Vec<(&'static str, PathBuf)>,
}

impl Inside {
    /// With one T4.
    pub(crate) fn new(name: &str) -> Self {
        let built = emulated();
        let variables = vec![
            ("MUXFLOW_TEST_FAULT", built.join("muxflow-emulated-fault")),
            ("MUXFLOW_TEST_BUILT", built),
            ("MUXFLOW_TEST_CHILD", child_program()),
            ("MUXFLOW_TEST_XCUDA", xcuda().to_owned()),
            ("MUXFLOW_TEST_WORKER", client("worker", &[])),
        ];
        Inside { name: name.to_owned(), gpus: "t4".to_owned(), variables }
    }

    /// A variable more, or another value for one.
    pub(crate) fn set(mut self, name: &'static str, value: impl Into<PathBuf>) -> Self {
        self.variables.push((name, value.into()));
        self
    }

    pub(crate) fn run(self) {
        let mut command = Command::new(emulated().join("muxflow-emulated-node"));
        command
            .args(["--gpus", &self.gpus, "--"])
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", &self.name, "--ignored", "--nocapture"])
            .envs(self.variables);
        let output = default_signals(&mut command).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{}\n{text}\n{errors}", output.status);
        assert!(text.contains("1 passed"), "nothing ran inside: {text}");
        for line in text.lines().filter(|line| line.starts_with("MEASURED")) {
            println!("{line}");
        }
    }
}
