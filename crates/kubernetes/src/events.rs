//! Events on pods, from whoever acts on them.

use std::sync::Arc;

use futures::StreamExt as _;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::Event as Written;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::Client;
use kube::api::{Api, ObjectMeta, PostParams};
use kube::runtime::events::{Event, EventType, Recorder, Reporter};

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::scheduler::pods::PodName;

/// How many events that can wait are under way at once.
const PARALLEL: usize = 4;

/// Says things of which nobody waits for the end, in the background, while others act. What is still
/// unsaid when the program ends stays so.
pub(crate) struct Later(UnboundedSender<Said>);

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
        teller.tell_once(said).await;
    })
    .await;
}

/// Writes events in the name of one program.
pub(crate) struct Teller {
    client: Client,
    reporter: Reporter,
    recorder: Recorder,
}

impl Teller {
    pub(crate) fn new(client: Client, program: &str, instance: &str) -> Self {
        let reporter =
            Reporter { controller: program.to_owned(), instance: Some(instance.to_owned()) };
        let recorder = Recorder::new(client.clone(), reporter.clone());
        Teller { client, reporter, recorder }
    }

    /// Says something that is said of a pod but once. The recorder would remember it for minutes and
    /// look through all that it remembers at each event, to count what is said again.
    async fn tell_once(&self, said: Said) {
        let Said { pod, reason, action, note } = said;
        let now = jiff::Timestamp::now();
        let event = Written {
            metadata: ObjectMeta {
                name: Some(format!("{}.{:x}", pod.name, now.as_nanosecond())),
                namespace: Some(pod.namespace.clone()),
                ..ObjectMeta::default()
            },
            action: Some(action.to_owned()),
            event_time: Some(MicroTime(now)),
            note: Some(note),
            reason: Some(reason.to_owned()),
            regarding: Some(subject(&pod)),
            reporting_controller: Some(self.reporter.controller.clone()),
            reporting_instance: self.reporter.instance.clone(),
            type_: Some("Normal".to_owned()),
            ..Written::default()
        };
        let api: Api<Written> = Api::namespaced(self.client.clone(), &pod.namespace);
        if let Err(error) = api.create(&PostParams::default(), &event).await {
            tracing::warn!(pod = pod.path(), %error, "an event could not be written");
        }
    }

    /// Says something about a pod; a failure is logged, because an event is no more than a word.
    pub(crate) async fn tell(
        &self,
        pod: &PodName,
        type_: EventType,
        reason: &str,
        action: &str,
        note: &str,
    ) {
        let mut note = note.to_owned();
        note.truncate(note.floor_char_boundary(1000));
        let event = Event {
            type_,
            reason: reason.to_owned(),
            note: Some(note),
            action: action.to_owned(),
            secondary: None,
        };
        if let Err(error) = self.recorder.publish(&event, &subject(pod)).await {
            tracing::warn!(pod = pod.path(), %error, "an event could not be written");
        }
    }
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
