//! One module per subcommand. Add a variant here and a file beside it.

mod agent;
mod cancel;
mod config;
mod connect;
mod demo;
mod describe;
mod doctor;
mod emulate;
mod evaluate;
mod export;
mod gpus;
mod jobs;
mod logs;
mod manual;
mod matching;
mod node;
mod paper;
pub(crate) mod patience;
mod pause;
mod plan;
mod predict;
mod replay;
mod run;
mod scheduler;
mod service;
mod simulate;
mod submit;
mod trace;
mod train;
mod up;
mod wait;

use std::process::ExitCode;

use clap::Subcommand;

/// What the program can be asked to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Check or print the configuration of the node laws.
    #[command(subcommand)]
    Config(config::ConfigCommand),
    Emulate(emulate::EmulateArgs),
    Gpus(gpus::GpusArgs),
    Manual(manual::ManualArgs),
    Match(matching::MatchArgs),
    Agent(agent::AgentArgs),
    /// A process that the agent starts for itself.
    #[command(hide = true)]
    AgentChild(agent::ChildArgs),
    Demo(demo::DemoArgs),
    Doctor(doctor::DoctorArgs),
    /// Tell the agent of this node what only a person knows.
    #[command(subcommand)]
    Node(node::NodeCommand),
    Plan(plan::PlanArgs),
    Evaluate(evaluate::EvaluateArgs),
    Export(export::ExportArgs),
    Predict(predict::PredictArgs),
    Train(train::TrainArgs),
    Run(run::RunArgs),
    Paper(paper::PaperArgs),
    Simulate(simulate::SimulateArgs),
    /// Make traces of jobs or requests, and show what is in one.
    #[command(subcommand)]
    Trace(trace::TraceCommand),
    Scheduler(scheduler::SchedulerArgs),
    Service(service::ServiceArgs),
    Up(up::UpArgs),
    Submit(submit::SubmitArgs),
    Jobs(jobs::JobsArgs),
    Describe(describe::DescribeArgs),
    Logs(logs::LogsArgs),
    Cancel(cancel::CancelArgs),
    Wait(wait::WaitArgs),
    /// Have all offline work leave its GPUs, and start none until `resume`.
    Pause(pause::PauseArgs),
    /// Let offline work go on after `pause`.
    Resume(pause::PauseArgs),
    Replay(replay::ReplayArgs),
}

impl Command {
    /// Whether it only asks, computes and prints, and looks after no process.
    pub(crate) fn only_prints(&self) -> bool {
        !matches!(
            self,
            Self::Agent(_)
                | Self::AgentChild(_)
                | Self::Demo(_)
                | Self::Doctor(_)
                | Self::Emulate(_)
                | Self::Run(_)
                | Self::Scheduler(_)
                | Self::Up(_)
        )
    }

    /// Does it; the exit code is the answer where a command has one beside success and failure.
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        match self {
            Command::Config(command) => command.run(),
            Command::Emulate(args) => emulate::run(&args),
            Command::Gpus(args) => gpus::run(&args),
            Command::Manual(args) => manual::run(&args),
            Command::Match(args) => matching::run(&args),
            Command::Agent(args) => agent::run(&args),
            Command::AgentChild(args) => Ok(agent::run_child(args)),
            Command::Demo(args) => demo::run(&args),
            Command::Doctor(args) => doctor::run(&args),
            Command::Node(command) => command.run(),
            Command::Plan(args) => plan::run(args),
            Command::Evaluate(args) => evaluate::run(&args),
            Command::Export(args) => export::run(&args),
            Command::Predict(args) => predict::run(&args),
            Command::Train(args) => train::run(&args),
            Command::Run(args) => run::run(args),
            Command::Paper(args) => paper::run(args),
            Command::Simulate(args) => simulate::run(args),
            Command::Trace(command) => command.run(),
            Command::Scheduler(args) => scheduler::run(args),
            Command::Service(args) => service::run(&args),
            Command::Up(args) => up::run(&args),
            Command::Submit(args) => submit::run(args),
            Command::Jobs(args) => jobs::run(&args),
            Command::Describe(args) => describe::run(&args),
            Command::Logs(args) => logs::run(&args),
            Command::Cancel(args) => cancel::run(&args),
            Command::Wait(args) => wait::run(&args),
            Command::Pause(args) => pause::run(&args, true),
            Command::Resume(args) => pause::run(&args, false),
            Command::Replay(args) => replay::run(&args),
        }
    }
}
