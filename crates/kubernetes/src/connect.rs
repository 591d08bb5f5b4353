//! Clients of the API server that do what they are told, once.

use std::path::Path;

use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};

use crate::Error;

/// A client by a kubeconfig file, or by `KUBECONFIG`, `~/.kube/config` or the pod's service account.
pub async fn connect(kubeconfig: Option<&Path>) -> Result<Client, Error> {
    let config = match kubeconfig {
        Some(path) => {
            let file = Kubeconfig::read_from(path).map_err(failed)?;
            let options = KubeConfigOptions::default();
            Config::from_custom_kubeconfig(file, &options).await.map_err(failed)?
        }
        None => Config::infer().await.map_err(failed)?,
    };
    client(config)
}

/// A client that sends each request once. A client that silently repeats a refused request would act
/// after its lease has run out, and would hide that a disruption budget said no.
pub fn client(mut config: Config) -> Result<Client, Error> {
    config.default_retry = false;
    Client::try_from(config).map_err(failed)
}

fn failed(error: impl std::error::Error + Send + Sync + 'static) -> Error {
    Error::Connect(Box::new(error))
}
