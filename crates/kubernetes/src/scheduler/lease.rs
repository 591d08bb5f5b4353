//! Which replica of the scheduler acts: the one that holds a Lease.
//!
//! A replica that loses its connection cannot know whether another one has taken over, so it stops
//! acting by its own clock well before the others may start: it acts only for two thirds of the
//! lease's length after its last renewal, and each request that it sends has less than the remaining
//! third to be answered. The others wait for the whole length from the moment at which they last saw
//! the lease change; no clock is compared with another machine's.

use std::time::{Duration, Instant};

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::api::{Api, ObjectMeta, PostParams};
use kube::{Client, Error as KubeError};

use crate::Error;

/// Leave to act.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Valid {
    /// Until when, by this machine's clock.
    pub(crate) until: Instant,
    /// Changes whenever the lease has changed hands: somebody else may have acted in between.
    pub(crate) term: i32,
}

/// One replica's claim.
#[derive(Debug)]
pub(crate) struct Claim {
    api: Api<Lease>,
    name: String,
    identity: String,
    length: Duration,
    renewed: Option<Instant>,
    term: i32,
    seen: Option<(Seen, Instant)>,
}

/// What of a lease shows that its holder is alive.
type Seen = (Option<String>, Option<MicroTime>, Option<i32>);

impl Claim {
    /// A claim on a lease of this name.
    pub(crate) fn new(
        client: Client,
        namespace: &str,
        name: &str,
        identity: &str,
        length: Duration,
    ) -> Self {
        Claim {
            api: Api::namespaced(client, namespace),
            name: name.to_owned(),
            identity: identity.to_owned(),
            length,
            renewed: None,
            term: 0,
            seen: None,
        }
    }

    /// How long to wait between two calls of [`Claim::tend`].
    pub(crate) fn period(&self) -> Duration {
        self.length / 6
    }

    /// Until when this replica may act; `None` when it may not.
    pub(crate) fn valid(&self) -> Option<Valid> {
        let until = self.renewed? + self.length * 2 / 3;
        (until > Instant::now()).then_some(Valid { until, term: self.term })
    }

    /// Takes the lease if it is free, renews it if it is ours. True while it is ours.
    pub(crate) async fn tend(&mut self) -> Result<bool, Error> {
        let before = Instant::now();
        let subject = format!("lease {}", self.name);
        let found = self.api.get_opt(&self.name).await;
        let written = match found.map_err(Error::request("read", subject.as_str()))? {
            None => self.api.create(&PostParams::default(), &self.fresh()).await,
            Some(lease) => {
                if !self.may_take(&lease) {
                    self.renewed = None;
                    return Ok(false);
                }
                // The resource version of what was read goes along: of two who write, one loses.
                self.api.replace(&self.name, &PostParams::default(), &self.ours(lease)).await
            }
        };
        match written {
            Ok(lease) => {
                self.term = lease.spec.and_then(|s| s.lease_transitions).unwrap_or(0);
                self.renewed = Some(before);
                Ok(true)
            }
            Err(KubeError::Api(status)) if status.code == 409 => {
                self.renewed = None;
                Ok(false)
            }
            Err(error) => Err(Error::request("write", subject)(error)),
        }
    }

    /// Gives the lease back, so that another replica need not wait for its end.
    pub(crate) async fn release(&mut self) {
        self.renewed = None;
        let Ok(Some(mut lease)) = self.api.get_opt(&self.name).await else { return };
        let spec = lease.spec.get_or_insert_default();
        if spec.holder_identity.as_deref() != Some(&self.identity) {
            return;
        }
        spec.holder_identity = None;
        spec.lease_duration_seconds = Some(1);
        if let Err(error) = self.api.replace(&self.name, &PostParams::default(), &lease).await {
            tracing::warn!(%error, lease = self.name, "the lease could not be given back; it will run out");
        }
    }

    fn may_take(&mut self, lease: &Lease) -> bool {
        let empty = LeaseSpec::default();
        let spec = lease.spec.as_ref().unwrap_or(&empty);
        let holder = spec.holder_identity.as_deref().unwrap_or_default();
        if holder == self.identity || holder.is_empty() {
            return true;
        }
        let now = Instant::now();
        let seen = (spec.holder_identity.clone(), spec.renew_time.clone(), spec.lease_transitions);
        match &self.seen {
            Some((known, since)) if *known == seen => {
                let seconds = spec.lease_duration_seconds.and_then(|s| u64::try_from(s).ok());
                let length = seconds.map_or(self.length, Duration::from_secs).max(self.length);
                now.duration_since(*since) > length
            }
            _ => {
                self.seen = Some((seen, now));
                false
            }
        }
    }

    fn fresh(&self) -> Lease {
        let lease = Lease {
            metadata: ObjectMeta { name: Some(self.name.clone()), ..ObjectMeta::default() },
            spec: None,
        };
        self.ours(lease)
    }

    fn ours(&self, mut lease: Lease) -> Lease {
        let now = MicroTime(jiff::Timestamp::now());
        let spec = lease.spec.get_or_insert_default();
        if spec.holder_identity.as_deref() != Some(&self.identity) {
            spec.holder_identity = Some(self.identity.clone());
            spec.acquire_time = Some(now.clone());
            spec.lease_transitions = Some(spec.lease_transitions.unwrap_or(0) + 1);
        }
        spec.lease_duration_seconds =
            Some(i32::try_from(self.length.as_secs().max(1)).unwrap_or(i32::MAX));
        spec.renew_time = Some(now);
        lease
    }
}
