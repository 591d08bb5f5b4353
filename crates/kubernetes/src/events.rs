//! Events on pods, from whoever acts on them.

use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};

use crate::scheduler::pods::PodName;

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
