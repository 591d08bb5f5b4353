//! How many files this process may have open. An agent without a free descriptor is blind, so it
//! takes as many as it may have; its children get back what was usual before.

use std::io;
use std::sync::OnceLock;

/// What this process was started with, once it has taken more.
static GIVEN: OnceLock<libc::rlimit> = OnceLock::new();

fn read() -> io::Result<libc::rlimit> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is a valid place to write to.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(limit)
}

fn write(limit: &libc::rlimit) -> io::Result<()> {
    // SAFETY: `limit` is a valid limit that lives through the call.
    if unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const *limit) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// How many may be open; at least 64 where nobody can tell.
pub fn most() -> usize {
    read().ok().and_then(|limit| usize::try_from(limit.rlim_cur).ok()).unwrap_or(64)
}

/// Takes as many as this process may have; says how many.
pub fn raise() -> io::Result<usize> {
    let given = read()?;
    if given.rlim_cur < given.rlim_max {
        write(&libc::rlimit { rlim_cur: given.rlim_max, ..given })?;
        GIVEN.get_or_init(|| given);
    }
    Ok(most())
}

/// For a child between fork and exec: the usual limit, for programs that have a table of that size.
pub(crate) fn give_back() -> io::Result<()> {
    GIVEN.get().map_or(Ok(()), write)
}

/// Few, for tests.
#[cfg(test)]
pub(crate) fn lower(to: u64) -> io::Result<()> {
    write(&libc::rlimit { rlim_cur: to, ..read()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_agent_takes_all_and_its_children_get_the_usual() {
        const NAME: &str = "descriptors::tests::the_agent_takes_all_and_its_children_get_the_usual";
        if std::env::var_os("MUXFLOW_TEST_DESCRIPTORS").is_none() {
            // In a process of its own: limits hold for all tests of a process.
            let mut again = std::process::Command::new(std::env::current_exe().unwrap());
            again.args(["--exact", NAME]).env("MUXFLOW_TEST_DESCRIPTORS", "1");
            let done = again.output().unwrap();
            assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stdout));
            return;
        }
        lower(100).unwrap();
        let hard = usize::try_from(read().unwrap().rlim_max).unwrap();
        assert_eq!((raise().unwrap(), most()), (hard, hard));
        assert_eq!(raise().unwrap(), hard, "a second time changes nothing");
        let mut child = std::process::Command::new("sh");
        child.args(["-c", "ulimit -n"]);
        let setup = crate::sys::ChildSetup::default();
        let said = crate::sys::with_setup(&mut child, setup).output().unwrap().stdout;
        assert_eq!(String::from_utf8_lossy(&said).trim(), "100");
        let mut child = std::process::Command::new("cat");
        child.arg("/proc/self/oom_score_adj");
        let oom_score = Some(crate::sys::OomScore::First);
        let setup = crate::sys::ChildSetup { oom_score, ..crate::sys::ChildSetup::default() };
        let said = crate::sys::with_setup(&mut child, setup).output().unwrap().stdout;
        assert_eq!(String::from_utf8_lossy(&said).trim(), "500", "the kernel ends it first");
    }
}
