//! Events on pods, from whoever acts on them.
//!
//! Each event is an object of its own, with the words of its moment. A recorder that counts repetitions
//! on the first one would keep the reason of the first time for ever.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures::StreamExt as _;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::Event as Written;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::Client;
use kube::api::{Api, ObjectMeta, PostParams};
use kube::runtime::events::EventType;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::scheduler::pods::PodName;

/// An event is no more than a word: nobody waits longer for it to be taken.
const WRITE_LIMIT: Duration = Duration::from_secs(5);
/// How many events that can wait are under way at once.
const PARALLEL: usize = 4;

/// The same words about the same pod are written again after this long at the earliest.
const AGAIN_AFTER: Duration = Duration::from_secs(300);
/// So many are remembered before those that are over are looked for.
const MANY: usize = 4096;
/// An object's name may have 253 characters; the time needs 17.
const NAME_ROOM: usize = 230;

/// Says things of which nobody waits for the end, in the background, while others act. What is still
/// unsaid when the program ends stays so.
#[derive(Debug, Clone)]
pub(crate) struct Later(UnboundedSender<Said>);

#[derive(Debug)]
struct Said {
    pod: PodName,
    reason: &'static str,
    action: &'static str,
    note: String,
}

impl Later {
    pub(crate) fn new(teller: Arc<Teller>) -> Self {
        let (say, said) = unbounded_channel();
        tokio::spawn(publish(teller, said));
        Later(say)
    }

    pub(crate) fn tell(
        &self,
        pod: PodName,
        reason: &'static str,
        action: &'static str,
        note: String,
    ) {
        // The other side ends only after this one.
        drop(self.0.send(Said { pod, reason, action, note }));
    }
}

async fn publish(teller: Arc<Teller>, said: UnboundedReceiver<Said>) {
    let all = futures::stream::unfold(said, |mut said| async move {
        let next = said.recv().await?;
        Some((next, said))
    });
    let teller = &*teller;
    all.for_each_concurrent(PARALLEL, |said| async move {
        let Said { pod, reason, action, note } = said;
        teller.write(&pod, EventType::Normal, reason, action, &note).await;
    })
    .await;
}

/// What was said lately, by the pod's uid and the reason.
#[derive(Debug, Default)]
struct Lately(BTreeMap<(String, String), (String, Instant)>);

impl Lately {
    /// Whether this is to be said, and remembers that it was.
    fn is_news(&mut self, pod: &PodName, reason: &str, note: &str, now: Instant) -> bool {
        let fresh = |at: Instant| now.saturating_duration_since(at) < AGAIN_AFTER;
        let key = (pod.uid.clone(), reason.to_owned());
        if self.0.get(&key).is_some_and(|(before, at)| before == note && fresh(*at)) {
            return false;
        }
        // Looked through once for so many that came, not for each.
        if self.0.len() >= MANY && self.0.len().is_power_of_two() {
            self.0.retain(|_, (_, at)| fresh(*at));
        }
        self.0.insert(key, (note.to_owned(), now));
        true
    }
}

/// Writes events in the name of one program.
pub(crate) struct Teller {
    client: Client,
    program: String,
    instance: String,
    lately: Mutex<Lately>,
}

impl Teller {
    pub(crate) fn new(client: Client, program: &str, instance: &str) -> Self {
        Teller {
            client,
            program: program.to_owned(),
            instance: instance.to_owned(),
            lately: Mutex::default(),
        }
    }

    /// Says something about a pod, unless the same was said of it a moment ago.
    pub(crate) async fn tell(
        &self,
        pod: &PodName,
        type_: EventType,
        reason: &str,
        action: &str,
        note: &str,
    ) {
        let news = self.lately.lock().unwrap_or_else(PoisonError::into_inner).is_news(
            pod,
            reason,
            note,
            Instant::now(),
        );
        if news {
            self.write(pod, type_, reason, action, note).await;
        }
    }

    /// Writes it; a failure is logged, because an event is no more than a word.
    async fn write(&self, pod: &PodName, type_: EventType, reason: &str, action: &str, note: &str) {
        let now = jiff::Timestamp::now();
        let event = Written {
            metadata: ObjectMeta {
                name: Some(event_name(&pod.name, now)),
                namespace: Some(pod.namespace.clone()),
                ..ObjectMeta::default()
            },
            action: Some(action.to_owned()),
            event_time: Some(MicroTime(now)),
            note: Some(note[..note.floor_char_boundary(1000)].to_owned()),
            reason: Some(reason.to_owned()),
            regarding: Some(subject(pod)),
            reporting_controller: Some(self.program.clone()),
            reporting_instance: Some(self.instance.clone()),
            type_: Some(
                match type_ {
                    EventType::Normal => "Normal",
                    EventType::Warning => "Warning",
                }
                .to_owned(),
            ),
            ..Written::default()
        };
        let api: Api<Written> = Api::namespaced(self.client.clone(), &pod.namespace);
        let parameters = PostParams::default();
        let writing = api.create(&parameters, &event);
        match tokio::time::timeout(WRITE_LIMIT, writing).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => {
                tracing::warn!(pod = pod.path(), %error, "an event could not be written");
            }
            Err(_) => tracing::warn!(pod = pod.path(), "an event was not taken in time"),
        }
    }
}

/// The pod's name, or as much of it as there is room for, and the moment.
fn event_name(pod: &str, at: jiff::Timestamp) -> String {
    let room = pod[..pod.floor_char_boundary(NAME_ROOM)].trim_end_matches(['.', '-']);
    format!("{room}.{:x}", at.as_nanosecond())
}

fn subject(pod: &PodName) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Pod".to_owned()),
        name: Some(pod.name.clone()),
        namespace: Some(pod.namespace.clone()),
        uid: Some(pod.uid.clone()),
        ..ObjectReference::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(uid: &str) -> PodName {
        PodName { namespace: "d".into(), name: "p".into(), uid: uid.into() }
    }

    #[test]
    fn new_words_are_said_at_once_and_old_ones_after_a_while() {
        let (mut lately, now) = (Lately::default(), Instant::now());
        assert!(lately.is_news(&pod("u"), "FailedScheduling", "no GPU", now));
        assert!(!lately.is_news(&pod("u"), "FailedScheduling", "no GPU", now + AGAIN_AFTER / 2));
        assert!(lately.is_news(&pod("u"), "FailedScheduling", "no memory", now));
        assert!(lately.is_news(&pod("u"), "EvictionRefused", "no memory", now));
        assert!(lately.is_news(&pod("v"), "FailedScheduling", "no memory", now));
        assert!(lately.is_news(&pod("u"), "FailedScheduling", "no memory", now + AGAIN_AFTER));
    }

    #[test]
    fn what_is_over_is_forgotten_some_time() {
        let (mut lately, now) = (Lately::default(), Instant::now());
        for n in 0..MANY {
            assert!(lately.is_news(&pod(&format!("u{n}")), "Moved", "x", now));
        }
        assert_eq!(lately.0.len(), MANY);
        assert!(lately.is_news(&pod("v"), "Moved", "x", now + AGAIN_AFTER));
        assert_eq!(lately.0.len(), 1);
    }

    #[tokio::test]
    async fn a_server_that_does_not_answer_keeps_nobody() {
        let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let uri = format!("http://{}", silent.local_addr().unwrap()).parse().unwrap();
        let mut config = kube::Config::new(uri);
        (config.read_timeout, config.write_timeout) = (None, None);
        let teller = Teller::new(Client::try_from(config).unwrap(), "test", "here");
        let pod = pod("u");
        let telling = teller.tell(&pod, EventType::Normal, "Moved", "Moving", "x");
        let waited = tokio::time::timeout(WRITE_LIMIT * 6, telling).await;
        assert!(waited.is_ok(), "somebody still waits for a word to be taken");
    }

    #[test]
    fn a_long_name_leaves_room_for_the_moment() {
        let name = event_name(&"a".repeat(253), jiff::Timestamp::now());
        assert!(name.len() <= 253, "{name}");
        let cut = event_name(&format!("{}.{}", "a".repeat(229), "b"), jiff::Timestamp::UNIX_EPOCH);
        assert_eq!(cut, format!("{}.0", "a".repeat(229)));
    }
}
