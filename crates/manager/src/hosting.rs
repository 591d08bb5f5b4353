//! What `muxflow up` adds to the API: services with their fronts, and the dashboard.

use std::sync::Arc;
use std::time::Duration;

use muxflow_agent::agent::AgentHandle;
use muxflow_services::executor::AgentExecutor;
use muxflow_services::manager::ServiceManager;

use crate::config::UpConfig;
use crate::error::{ManagerError, Result};
use crate::http::server::Extras;
use crate::http::{dashboard, services};

/// Requests under way may take so long when the manager leaves.
const FINISH_WITHIN: Duration = Duration::from_secs(2);

/// Services that are hosted, with the threads that their fronts run on.
#[derive(Debug)]
pub struct Hosting {
    /// The services.
    pub services: Arc<ServiceManager>,
    runtime: Option<tokio::runtime::Runtime>,
}

impl Hosting {
    /// Takes up the services that are written down in the state directory. In shadow mode those that
    /// run are found and served, and none is started or stopped.
    pub fn start(agent: &AgentHandle, config: &UpConfig) -> Result<Self> {
        let dir = config.state_dir.join("services");
        let failed = |source| ManagerError::File {
            operation: "start threads for",
            path: dir.clone(),
            source,
        };
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("front")
            .enable_all()
            .build()
            .map_err(failed)?;
        let configured = config.agent.online.iter();
        let configured = configured.map(|(_, spec)| spec.service.as_str().to_owned()).collect();
        let shadow = config.settings.shadow;
        let executor = Arc::new(AgentExecutor::new(agent.clone(), configured, shadow));
        let services = ServiceManager::start(executor, &dir, runtime.handle().clone())
            .map_err(|error| ManagerError::Conflict(error.to_string()))?;
        Ok(Hosting { services: Arc::new(services), runtime: Some(runtime) })
    }

    /// What the server gets from here.
    pub fn extras(&self) -> Extras {
        Extras { routes: services::routes(Arc::clone(&self.services)), pages: dashboard::pages() }
    }

    /// Where other work of the fronts' runtime can go.
    pub fn handle(&self) -> Option<&tokio::runtime::Handle> {
        self.runtime.as_ref().map(tokio::runtime::Runtime::handle)
    }
}

impl Drop for Hosting {
    /// Fronts take no new requests and close once those under way have ended, or after a while;
    /// replicas go on.
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            self.services.close(runtime, FINISH_WITHIN);
        }
    }
}
