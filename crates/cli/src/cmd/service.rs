//! `muxflow service`: declare, look at, restart and remove online services.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, Subcommand};
use muxflow_api::service::{ServiceDeclaration, ServiceList, ServiceView};

use super::connect::{ConnectArgs, escaped};
use crate::table::Table;

/// Online services behind one port each: declare, list, restart, remove.
#[derive(Debug, Args)]
pub(crate) struct ServiceArgs {
    #[command(subcommand)]
    what: What,
    #[command(flatten)]
    connect: ConnectArgs,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Declare a service from a JSON file, or change the one of the same name.
    Declare {
        /// The file; `muxflow service example` prints one to start from.
        file: PathBuf,
    },
    /// Print a declaration with every field.
    Example,
    /// All services with their latency against the SLO.
    List,
    /// Replace every replica, one after another, without losing a request.
    Restart {
        /// Which service.
        name: String,
    },
    /// Let requests finish, stop all replicas and forget the service.
    Remove {
        /// Which service.
        name: String,
    },
}

const EXAMPLE: &str = r#"{
  "name": "ranking",
  "command": ["python", "serve.py", "--port", "{port}"],
  "env": {},
  "cwd": "/srv/ranking",
  "user": "root",
  "gpu_type": "T4",
  "port": 8080,
  "min_replicas": 1,
  "max_replicas": 2,
  "load_per_replica": 2.0,
  "health": {
    "path": "/healthz", "every_ms": 1000, "within_ms": 2000, "down_after": 2,
    "restart_after_ms": 60000
  },
  "slo_ms": 50,
  "critical": false,
  "request_within_ms": 30000,
  "drain_within_ms": 30000
}
"#;

fn ms(value: Option<f64>) -> String {
    value.map_or_else(|| "-".into(), |ms| format!("{ms:.1} ms"))
}

fn row(view: &ServiceView) -> [String; 7] {
    let ready = view.replicas.iter().filter(|replica| replica.state == "ready").count();
    [
        view.declared.name.clone(),
        view.address.clone(),
        format!("{ready} of {}", view.wanted_replicas),
        format!("{:.1}", view.latency.rate_per_s),
        ms(view.latency.p99_ms),
        ms(view.declared.slo_ms),
        format!("{} of {}", view.failed_total, view.requests_total),
    ]
}

#[expect(clippy::print_stderr, reason = "a word to the reader, beside the table")]
fn nothing() {
    eprintln!(
        "no services yet; `muxflow service example > web.json`, edit it, `muxflow service declare web.json`"
    );
}

/// A service in the path of a request.
fn path_of(name: &str) -> String {
    format!("/v1/services/{}", escaped(name))
}

#[expect(clippy::print_stdout, reason = "the answer of the command")]
pub(crate) fn run(args: &ServiceArgs) -> anyhow::Result<ExitCode> {
    match &args.what {
        What::Example => print!("{EXAMPLE}"),
        What::Declare { file } => {
            let text = std::fs::read_to_string(file)
                .with_context(|| format!("cannot read {}", file.display()))?;
            let declared: ServiceDeclaration = serde_json::from_str(&text)
                .with_context(|| format!("{} is no declaration", file.display()))?;
            let view: ServiceView = args.connect.client()?.post("/v1/services", &declared)?;
            println!("{} answers at http://{}", view.declared.name, view.address);
        }
        What::List => {
            let list: ServiceList = args.connect.client()?.get("/v1/services")?;
            let heads = ["SERVICE", "FRONT", "REPLICAS", ">REQ/S", ">P99", ">SLO", ">FAILED"];
            let mut table = Table::new(&heads);
            list.items.iter().for_each(|view| table.row(row(view)));
            print!("{}", table.render());
            if list.items.is_empty() {
                nothing();
            }
            for view in &list.items {
                if let Some(why) = &view.waiting_for {
                    println!("{}: {why}", view.declared.name);
                }
            }
        }
        What::Restart { name } => {
            let order = serde_json::json!({});
            let view: ServiceView =
                args.connect.client()?.post(&format!("{}/restart", path_of(name)), &order)?;
            println!("{}: {} replicas are replaced one by one", name, view.replicas.len());
        }
        What::Remove { name } => {
            let view: ServiceView = args.connect.client()?.delete(&path_of(name))?;
            println!("{} is gone; it answered {} requests", name, view.requests_total);
        }
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_example_is_a_declaration() {
        let declared: ServiceDeclaration = serde_json::from_str(EXAMPLE).unwrap();
        assert!(muxflow_services::spec::ServiceSpec::new(&declared).is_ok());
    }

    #[test]
    fn a_name_cannot_change_what_is_asked_for() {
        assert_eq!(path_of("web-1"), "/v1/services/web-1");
        assert_eq!(path_of("../jobs/job-1?x#y z"), "/v1/services/..%2Fjobs%2Fjob-1%3Fx%23y%20z");
    }
}
