//! Children that do not end when they are killed.
//!
//! A process inside a call of a driver that hangs ends only when that call returns, which may be never.
//! Probes and questions to MPS are made for such drivers, so nobody may wait for their end: what is not
//! gone after a moment is put aside here and reaped when somebody else comes by.

use std::process::{Child, ExitStatus};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What is killed and can end does so within this.
const MOMENT: Duration = Duration::from_secs(1);

/// Each with what it was started for.
static ASIDE: Mutex<Vec<(String, Child)>> = Mutex::new(Vec::new());

fn aside() -> MutexGuard<'static, Vec<(String, Child)>> {
    let mut aside = ASIDE.lock().unwrap_or_else(PoisonError::into_inner);
    aside.retain_mut(|(_, child)| matches!(child.try_wait(), Ok(None)));
    aside
}

/// Kills a child; how it ended, if it has. `what` it was started for tells it from others later.
pub(crate) fn end(mut child: Child, what: &str) -> Option<ExitStatus> {
    drop(child.kill());
    await_end(child, what, MOMENT)
}

fn await_end(mut child: Child, what: &str, limit: Duration) -> Option<ExitStatus> {
    let deadline = Instant::now() + limit;
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return Some(status),
            Ok(None) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(1));
            }
            Ok(None) => {
                tracing::warn!(
                    pid = child.id(),
                    what,
                    "a killed process does not end: it hangs in a driver"
                );
                aside().push((what.to_owned(), child));
                return None;
            }
            // Somebody else has reaped it.
            Err(_) => return None,
        }
    }
}

/// Whether one that was started for this was put aside and has not ended since.
pub(crate) fn holds(what: &str) -> bool {
    aside().iter().any(|(of, _)| of == what)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    fn sleeper() -> Child {
        Command::new("sleep").arg("600").spawn().unwrap()
    }

    #[test]
    fn nobody_waits_for_a_child_that_does_not_end() {
        let child = sleeper();
        let pid = child.id();
        assert_eq!(await_end(child, "a test", Duration::from_millis(20)), None);
        assert!(holds("a test") && !holds("another"), "it is put aside");
        crate::sys::kill(pid, libc::SIGKILL).unwrap();
        let deadline = Instant::now() + Duration::from_secs(20);
        while holds("a test") {
            assert!(Instant::now() < deadline, "it is never reaped");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(
            end(sleeper(), "another").is_some_and(|status| !status.success()),
            "one that can end does"
        );
    }
}
