//! A small snapshot to start from: two kinds of GPU, three services, jobs that run, wait and cannot
//! be placed. `muxflow plan --example` prints it.

/// The example, as a file that [`crate::snapshot::parse`] reads.
pub const SNAPSHOT: &str = include_str!("example.json");

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use crate::snapshot;

    #[test]
    fn the_example_is_read_and_written_back() {
        let parsed = snapshot::parse(super::SNAPSHOT).unwrap();
        assert_eq!(parsed.gpus.len(), 4);
        assert_eq!(parsed.jobs.len(), 6);
        assert_eq!(snapshot::parse(&snapshot::render(&parsed)).unwrap(), parsed);
    }

    /// Replaces one piece of the example and tells the error.
    fn broken(from: &str, to: &str) -> String {
        assert!(super::SNAPSHOT.contains(from), "{from} is not in the example");
        snapshot::parse(&super::SNAPSHOT.replacen(from, to, 1)).unwrap_err().to_string()
    }

    #[test]
    fn errors_name_the_field_and_the_remedy() {
        assert!(broken("\"version\": 1", "\"version\": 7").contains("version 1"));
        let share = broken("\"share_sms\": 28", "\"share_sms\": 99");
        assert!(share.contains("gpus[0].share_sms") && share.contains("40"), "{share}");
        let health = broken("\"Healthy\"", "\"Fine\"");
        assert!(health.contains("gpus[0].health") && health.contains("Overlimit"), "{health}");
        let activity =
            broken("\"predicted_sm_activity_pct\": 30.0", "\"predicted_sm_activity_pct\": 130.0");
        assert!(activity.contains("gpus[0].online.predicted_sm_activity_pct"), "{activity}");
        let unknown = broken("\"quota_bytes\"", "\"quota_byte\"");
        assert!(unknown.contains("line ") && unknown.contains("quota_byte"), "{unknown}");
        let twice = broken("\"job\": \"train-2\"", "\"job\": \"train-1\"");
        assert!(twice.contains("twice"), "{twice}");
        let one_sided = broken(", \"running\": \"train-1\"", "");
        assert!(one_sided.contains("running_on"), "{one_sided}");
        let speed = broken("\"T4\": 0.5", "\"T4\": -0.5");
        assert!(speed.contains("solo_speed.T4"), "{speed}");
        let priority = broken("\"priority\": 4", "\"priority\": 0");
        assert!(priority.contains("1 (normal)"), "{priority}");
        assert!(broken("{", "[").contains("line 2"));
    }

    proptest! {
        #[test]
        fn no_damage_to_the_text_panics(at in 0usize..3000, byte in 32u8..127) {
            let mut bytes = super::SNAPSHOT.as_bytes().to_vec();
            let at = at % bytes.len();
            bytes[at] = byte;
            if let Ok(text) = String::from_utf8(bytes)
                && let Ok(parsed) = snapshot::parse(&text)
            {
                prop_assert_eq!(snapshot::parse(&snapshot::render(&parsed)).unwrap(), parsed);
            }
        }
    }
}
