//! Events on pods, from whoever acts on them.

use std::sync::Arc;

use futures::StreamExt as _;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
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
        teller.tell(&said.pod, EventType::Normal, said.reason, said.action, &said.note).await;
    })
    .await;
}

/// Writes events in the name of one program.
pub(crate) struct Teller(Recorder);

impl Teller {
    pub(crate) fn new(client: Client, program: &str, instance: &str) -> Self {
        let reporter =
            Reporter { controller: program.to_owned(), instance: Some(instance.to_owned()) };
        Teller(Recorder::new(client, reporter))
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
        let subject = ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Pod".to_owned()),
            name: Some(pod.name.clone()),
            namespace: Some(pod.namespace.clone()),
            uid: Some(pod.uid.clone()),
            ..ObjectReference::default()
        };
        let mut note = note.to_owned();
        note.truncate(note.floor_char_boundary(1000));
        let event = Event {
            type_,
            reason: reason.to_owned(),
            note: Some(note),
            action: action.to_owned(),
            secondary: None,
        };
        if let Err(error) = self.0.publish(&event, &subject).await {
            tracing::warn!(pod = pod.path(), %error, "an event could not be written");
        }
    }
}
