//! The loop of one service: takes orders, takes steps, writes down what they change, and shows how
//! it stands.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::Duration;

use muxflow_api::service::{LatencyView, ReplicaView, ServiceDeclaration, ServiceView};
use muxflow_types::Micros;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::sync::watch;

use crate::ServiceError;
use crate::front::Front;
use crate::latency::Histogram;
use crate::pool::WINDOW;
use crate::service::{self, Service};
use crate::spec::ServiceSpec;
use crate::state;

/// Between two steps of a service.
const STEP: Duration = Duration::from_millis(50);

/// What a service is told.
pub(crate) enum Order {
    /// To be declared otherwise; the answer comes when that is on the disk.
    Declare(Box<(ServiceDeclaration, ServiceSpec)>, mpsc::Sender<Result<(), ServiceError>>),
    /// To replace all replicas.
    Restart,
    /// To let all replicas leave and to end.
    Remove,
}

fn latency_view(recent: &Histogram, window: Micros) -> LatencyView {
    let ms = |quantile| recent.quantile(quantile).map(|us| us.as_secs_f64() * 1e3);
    #[expect(clippy::cast_precision_loss, reason = "counts of requests")]
    let total = recent.total() as f64;
    LatencyView {
        p50_ms: ms(0.5),
        p99_ms: ms(0.99),
        rate_per_s: total / window.as_secs_f64().max(1e-3),
        window_s: window.as_secs_f64(),
    }
}

pub(crate) fn front_latency(front: &Front) -> LatencyView {
    let latency = front.latency.lock().unwrap_or_else(PoisonError::into_inner);
    latency_view(&latency.recent(service::now()), latency.length())
}

pub(crate) fn view_of(
    declared: &ServiceDeclaration,
    address: SocketAddr,
    service: &Service,
    front: &Front,
) -> ServiceView {
    let window = Micros(WINDOW.0.0 * WINDOW.1 as u64);
    let replicas = service.replicas().into_iter().map(|(replica, pid)| ReplicaView {
        name: replica.name.clone(),
        gpu: replica.place.clone(),
        state: replica.state().0.to_string(),
        address: replica.address.to_string(),
        pid,
        outstanding: u64::from(replica.outstanding()),
        latency: latency_view(&replica.recent(), window),
    });
    ServiceView {
        declared: declared.clone(),
        address: address.to_string(),
        wanted_replicas: service.wanted(),
        replicas: replicas.collect(),
        to_restart: service.restarts_left(),
        latency: front_latency(front),
        requests_total: front.counts.requests.load(Ordering::Relaxed),
        failed_total: front.counts.failed.load(Ordering::Relaxed),
        retried_total: front.counts.retried.load(Ordering::Relaxed),
        waiting_for: service.waiting_for().map(str::to_owned),
    }
}

/// One service with all that its loop needs.
pub(crate) struct ServiceLoop {
    pub(crate) declared: ServiceDeclaration,
    pub(crate) address: SocketAddr,
    pub(crate) service: Service,
    pub(crate) front: Arc<Front>,
    pub(crate) view: Arc<Mutex<ServiceView>>,
    pub(crate) path: PathBuf,
    pub(crate) written: Option<String>,
    pub(crate) told: bool,
    pub(crate) _gone: watch::Sender<()>,
}

impl ServiceLoop {
    /// Goes on until the service is removed or nobody can give orders any more.
    pub(crate) async fn run(mut self, mut orders: UnboundedReceiver<Order>) {
        let mut beat = tokio::time::interval(STEP);
        beat.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            let mut declared = None;
            tokio::select! {
                order = orders.recv() => match order {
                    Some(Order::Declare(both, answer)) => {
                        declared = Some((self.declare(both.0, both.1), answer));
                    }
                    Some(Order::Restart) => self.service.restart(),
                    Some(Order::Remove) => self.service.remove(),
                    None => return,
                },
                _ = beat.tick() => {}
            }
            self.service.step(service::now());
            match self.remember() {
                Ok(()) => self.service.order_planned(),
                Err(why) => self.service.drop_planned(&why),
            }
            let view = view_of(&self.declared, self.address, &self.service, &self.front);
            *self.view.lock().unwrap_or_else(PoisonError::into_inner) = view;
            if let Some((done, answer)) = declared {
                // Whoever asked may have left.
                drop(answer.send(done));
            }
            if self.service.is_gone() {
                drop(std::fs::remove_file(&self.path));
                return;
            }
        }
    }

    /// Takes a new declaration, if it can be written down.
    fn declare(
        &mut self,
        declared: ServiceDeclaration,
        spec: ServiceSpec,
    ) -> Result<(), ServiceError> {
        let declared = ServiceDeclaration { port: self.address.port(), ..declared };
        let text = state::text(&declared, &self.service.to_remember());
        if let Err(source) = self.write(text) {
            let (service, path) = (declared.name, self.path.clone());
            return Err(ServiceError::NotWritten { service, path, source });
        }
        let within = declared.request_within_ms;
        self.front.request_within_ms.store(within, Ordering::Relaxed);
        self.declared = declared;
        self.service.declare(spec);
        Ok(())
    }

    fn write(&mut self, text: String) -> std::io::Result<()> {
        state::write(&self.path, &text)?;
        (self.written, self.told) = (Some(text), false);
        self.service.can_write();
        Ok(())
    }

    /// Writes what changed, or says why not. A full disk is told once and tried again until there is
    /// room, so that it is known when there is none.
    fn remember(&mut self) -> Result<(), String> {
        let text = state::text(&self.declared, &self.service.to_remember());
        if self.written.as_ref() == Some(&text) && !self.service.must_write() {
            return Ok(());
        }
        if let Err(error) = self.write(text) {
            let path = self.path.display();
            if !self.told {
                tracing::error!(path = %path, error = %error, "a service cannot be written down");
                self.told = true;
            }
            return Err(format!("a new replica cannot be written down in {path}: {error}"));
        }
        Ok(())
    }
}
