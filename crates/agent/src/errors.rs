//! The error detector: XIDs from NVML and from the kernel log, told once each.
//!
//! NVML tells a number and the GPU; the log line adds the process and, for XID 154, what the driver
//! asks for. Both report the same event, so the second report of one XID on one GPU within a short
//! time from the *other* source is not a second error.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, ErrorKind, Read, Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use muxflow_policy::node::fault::Fault;
use muxflow_policy::node::xid::{self, RecoveryAction, XidLine};
use muxflow_types::Micros;
use nvml_wrapper::Nvml;
use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::enums::event::XidError;
use nvml_wrapper::error::NvmlError;

use crate::error::{AgentError, Result, file};
use crate::monitor;
use crate::monitor::nvml::recovery_of;
use crate::sys;

/// Who told of an XID.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Teller {
    /// An event of NVML.
    Nvml,
    /// A line of the kernel log.
    KernelLog,
}

/// One XID on one GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct XidSeen {
    /// When it was seen.
    pub at: Micros,
    /// Who told.
    pub teller: Teller,
    /// The GPU: a UUID from NVML, a PCI address from the log.
    pub gpu: String,
    /// The error.
    pub fault: Fault,
    /// The process that the driver blames.
    pub pid: Option<u32>,
}

/// The XID by which the driver asks for a recovery.
const RECOVERY_XID: u16 = 154;

/// Drops the echo of an event that both sources tell.
#[derive(Debug, Default)]
pub struct Echoes {
    recent: Vec<(Micros, Teller, String, Fault)>,
}

/// The line of the log has the culprit: it gets this long to be the first.
const LOG_FIRST: Duration = Duration::from_millis(20);

/// Both sources tell of an event within this time.
const ECHO_WITHIN: Micros = Micros::from_secs(2);

impl Echoes {
    /// Whether this is news; `gpu` must be the same name from both tellers.
    pub fn is_news(&mut self, at: Micros, teller: Teller, gpu: &str, fault: Fault) -> bool {
        self.recent.retain(|(then, ..)| at.since(*then) <= ECHO_WITHIN);
        let echo = self.recent.iter().position(|(_, other, which, what)| {
            *other != teller && which == gpu && same_event(*what, fault)
        });
        match echo {
            Some(index) => {
                self.recent.remove(index);
                false
            }
            None => {
                self.recent.push((at, teller, gpu.to_owned(), fault));
                true
            }
        }
    }
}

/// XID 154 may come from NVML without what it asks for.
fn same_event(a: Fault, b: Fault) -> bool {
    let bare = Fault::Recovery(RecoveryAction::Unknown);
    a == b || matches!((a, b), (Fault::Recovery(_), Fault::Recovery(_)) if a == bare || b == bare)
}

/// A thread that watches one source until it is dropped.
#[derive(Debug)]
pub struct Watcher {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        let Some(thread) = self.thread.take() else { return };
        let deadline = Instant::now() + ENDS_WITHIN;
        while !thread.is_finished() {
            if Instant::now() > deadline {
                // It goes with the process.
                let name = thread.thread().name().unwrap_or_default();
                return tracing::warn!(thread = name, "hangs in a call and is left behind");
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        drop(thread.join());
    }
}

/// A thread may be inside a driver that never returns: one that leaves waits no longer for it.
const ENDS_WITHIN: Duration = Duration::from_secs(2);

/// Starts a thread that ends when its watcher is dropped.
pub(crate) fn spawn(
    name: &str,
    body: impl FnOnce(&AtomicBool) + Send + 'static,
) -> Result<Watcher> {
    let stop = Arc::new(AtomicBool::new(false));
    let inside = Arc::clone(&stop);
    let thread = std::thread::Builder::new().name(name.to_owned()).spawn(move || body(&inside));
    let thread = thread.map_err(crate::error::system("start a thread"))?;
    Ok(Watcher { stop, thread: Some(thread) })
}

/// Watches NVML's events of all GPUs. XID 154 says that something is needed and not what: that is
/// asked for, and where the driver does not tell, it is left to the kernel log when that is watched.
pub fn watch_nvml(
    nvml: Arc<Nvml>,
    uuids: Vec<String>,
    log_is_watched: bool,
    mut tell: impl FnMut(XidSeen) + Send + 'static,
) -> Result<Watcher> {
    // Registering may fail; say so before the thread hides it.
    register(&nvml, &uuids).map(drop)?;
    spawn("xid-events", move |stop| {
        let Ok((mut set, mut lacking)) = register(&nvml, &uuids) else { return };
        let mut again_at = Instant::now() + REGISTER_AGAIN;
        while !stop.load(Ordering::Acquire) {
            if lacking && Instant::now() >= again_at {
                // One that is back is heard again.
                again_at = Instant::now() + REGISTER_AGAIN;
                if let Ok(new) = register(&nvml, &uuids) {
                    (set, lacking) = new;
                }
            }
            match set.wait(200) {
                Ok(event) => {
                    let Some(XidError::Value(number)) = event.event_data else { continue };
                    let (Ok(gpu), Ok(number)) = (event.device.uuid(), u16::try_from(number)) else {
                        continue;
                    };
                    let asked = (number == RECOVERY_XID)
                        .then(|| recovery_of(&event.device))
                        .flatten()
                        .filter(|action| *action != RecoveryAction::None);
                    if number == RECOVERY_XID && asked.is_none() && log_is_watched {
                        continue;
                    }
                    let fault = Fault::from_xid(number, asked);
                    let at = monitor::now();
                    if log_is_watched {
                        std::thread::sleep(LOG_FIRST);
                    }
                    tell(XidSeen { at, teller: Teller::Nvml, gpu, fault, pid: None });
                }
                Err(NvmlError::Timeout) => {}
                Err(error) => {
                    tracing::warn!(error = %error, "waiting for events of NVML failed");
                    std::thread::sleep(Duration::from_secs(1));
                    // After a lost device the set is of no use.
                    match register(&nvml, &uuids) {
                        Ok(new) => (set, lacking) = new,
                        Err(error) => tracing::warn!(error = %error, "no events of NVML"),
                    }
                }
            }
        }
    })
}

/// GPUs that could not be registered are tried again after this.
const REGISTER_AGAIN: Duration = Duration::from_secs(10);

/// Events of the GPUs that have some, and whether there are others. Fails when none has.
fn register<'nvml>(
    nvml: &'nvml Nvml,
    uuids: &[String],
) -> Result<(nvml_wrapper::EventSet<'nvml>, bool)> {
    let mut able: Vec<&String> = uuids.iter().collect();
    loop {
        match register_all(nvml, &able) {
            Ok(set) => return Ok((set, able.len() < uuids.len())),
            // The set is gone with the first that fails: begin anew without that one.
            Err((Some(index), error)) if able.len() > 1 => {
                let uuid = able.remove(index);
                tracing::debug!(gpu = uuid, error = %error, "no events of this GPU");
            }
            Err((_, error)) => {
                let reason = error.to_string();
                return Err(AgentError::Nvml { operation: "watch for XIDs", reason });
            }
        }
    }
}

fn register_all<'nvml>(
    nvml: &'nvml Nvml,
    uuids: &[&String],
) -> std::result::Result<nvml_wrapper::EventSet<'nvml>, (Option<usize>, NvmlError)> {
    let mut set = nvml.create_event_set().map_err(|error| (None, error))?;
    for (index, uuid) in uuids.iter().enumerate() {
        let device = nvml.device_by_uuid(uuid.as_str()).map_err(|error| (Some(index), error))?;
        let registered = device.register_events(EventTypes::CRITICAL_XID_ERROR, set);
        set = registered.map_err(|error| (Some(index), error.error))?;
    }
    Ok(set)
}

/// Watches the kernel log: `/dev/kmsg`, or a file that lines are added to. Lines that are there
/// already are old news.
pub fn watch_kernel_log(
    path: &Path,
    mut tell: impl FnMut(XidSeen) + Send + 'static,
) -> Result<Watcher> {
    let mut options = fs::OpenOptions::new();
    let mut log =
        options.read(true).custom_flags(libc::O_NONBLOCK).open(path).map_err(file("open", path))?;
    log.seek(SeekFrom::End(0)).map_err(file("find the end of", path))?;
    let path = path.to_owned();
    let is_device = log.metadata().is_ok_and(|meta| meta.file_type().is_char_device());
    let mut told = move |line: XidLine| {
        let fault = Fault::from_xid(line.xid, line.recovery);
        let at = monitor::now();
        tell(XidSeen { at, teller: Teller::KernelLog, gpu: line.pci, fault, pid: line.pid });
    };
    spawn("kernel-log", move |stop| {
        if is_device {
            follow_records(&mut log, stop, &mut told);
        } else {
            follow_lines(log, &path, stop, &mut told);
        }
    })
}

/// A file cannot be waited for.
const IDLE: Duration = Duration::from_millis(5);
const KMSG_WAIT: Duration = Duration::from_millis(200);

/// `/dev/kmsg` gives one record for each read.
fn follow_records(log: &mut File, stop: &AtomicBool, told: &mut impl FnMut(XidLine)) {
    let mut buffer = vec![0; 8192];
    while !stop.load(Ordering::Acquire) {
        match log.read(&mut buffer) {
            Ok(count) if count > 0 => {
                let record = String::from_utf8_lossy(buffer.get(..count).unwrap_or_default());
                record.lines().filter_map(xid::parse_kernel_line).for_each(&mut *told);
            }
            // Overwritten before it was read: the next read goes on after the gap.
            Err(error) if error.raw_os_error() == Some(libc::EPIPE) => {}
            Ok(_) => std::thread::sleep(IDLE),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                drop(sys::poll_readable(&[log.as_raw_fd()], KMSG_WAIT));
            }
            Err(error) => {
                tracing::warn!(error = %error, "cannot read the kernel log");
                std::thread::sleep(Duration::from_secs(1));
            }
        }
    }
}

/// A file is looked at by its name so often: it may have been turned over or cut.
const LOOK_ANEW: Duration = Duration::from_millis(250);

/// The file that has the name now, from its beginning, when it is another one than `log` or was cut.
fn turned_over(log: &mut BufReader<File>, path: &Path) -> Option<File> {
    let old = log.get_ref().metadata().ok()?;
    let now = fs::metadata(path).ok()?;
    let is_same = (old.dev(), old.ino()) == (now.dev(), now.ino());
    if is_same && now.len() >= log.stream_position().ok()? {
        return None;
    }
    tracing::info!(path = %path.display(), "the kernel log begins anew");
    File::open(path).ok()
}

fn follow_lines(log: File, path: &Path, stop: &AtomicBool, told: &mut impl FnMut(XidLine)) {
    let mut reader = BufReader::new(log);
    let mut line = String::new();
    let mut looked = Instant::now();
    while !stop.load(Ordering::Acquire) {
        match reader.read_line(&mut line) {
            Ok(count) if count > 0 && line.ends_with('\n') => {
                if let Some(seen) = xid::parse_kernel_line(line.trim_end()) {
                    told(seen);
                }
                line.clear();
            }
            // Nothing, or half a line: the rest comes.
            _ => {
                std::thread::sleep(IDLE);
                if looked.elapsed() >= LOOK_ANEW {
                    looked = Instant::now();
                    if let Some(new) = turned_over(&mut reader, path) {
                        reader = BufReader::new(new);
                        line.clear();
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::sync::mpsc;

    #[test]
    fn an_event_that_two_sources_tell_is_one() {
        let mut echoes = Echoes::default();
        let second = Micros::from_secs(1);
        assert!(echoes.is_news(Micros(0), Teller::KernelLog, "A", Fault::Xid(31)));
        assert!(!echoes.is_news(second, Teller::Nvml, "A", Fault::Xid(31)), "the echo");
        assert!(echoes.is_news(second, Teller::Nvml, "A", Fault::Xid(31)), "again is again");
        assert!(echoes.is_news(second, Teller::Nvml, "B", Fault::Xid(31)), "another GPU");
        let asked = Fault::Recovery(RecoveryAction::GpuReset);
        assert!(echoes.is_news(second, Teller::KernelLog, "A", asked));
        let bare = Fault::Recovery(RecoveryAction::Unknown);
        assert!(!echoes.is_news(second, Teller::Nvml, "A", bare));
        assert!(echoes.is_news(second, Teller::KernelLog, "A", asked));
        let more = Fault::Recovery(RecoveryAction::NodeReboot);
        assert!(echoes.is_news(second, Teller::Nvml, "A", more), "asks for something else");
        assert!(echoes.is_news(Micros::from_secs(9), Teller::KernelLog, "B", Fault::Xid(31)));
    }

    /// The kernel's own log, where root may write a line into it: most containers do not let it.
    #[test]
    fn an_error_in_the_log_of_the_kernel_is_told() {
        let path = Path::new("/dev/kmsg");
        let (send, seen) = std::sync::mpsc::channel();
        let pid = std::process::id();
        let watcher = watch_kernel_log(path, move |seen| {
            // Others may write there too.
            if seen.pid == Some(pid) {
                drop(send.send(seen));
            }
        });
        // A place on the bus that no GPU has. Without its end of line the kernel keeps a record back.
        let line =
            format!("<3>NVRM: Xid (PCI:ffff:fe:1f): 31, pid={pid}, name=test, a test of MuxFlow\n");
        let written = fs::OpenOptions::new().write(true).open(path);
        let written = written.and_then(|mut log| log.write_all(line.as_bytes()));
        let (Ok(_watcher), Ok(())) = (&watcher, &written) else {
            println!(
                "SKIPPED: /dev/kmsg cannot be read and written here ({:?}, {written:?}); run the tests as root outside a container",
                watcher.err().map(|error| error.to_string())
            );
            return;
        };
        let told = seen.recv_timeout(Duration::from_secs(30));
        let told = told.expect("the line is told");
        assert_eq!((told.teller, told.pid), (Teller::KernelLog, Some(pid)));
        assert_eq!(told.fault, Fault::from_xid(31, None));
    }

    /// `/dev/kmsg` gives one record for each read and fails where there is none; so does a pipe in
    /// packet mode.
    #[test]
    fn records_of_the_kernel_are_told() {
        use std::os::fd::FromRawFd;
        let mut ends = [0; 2];
        // SAFETY: room for two descriptors, which are ours from here on.
        let (mut read, mut write) = unsafe {
            let flags = libc::O_DIRECT | libc::O_NONBLOCK | libc::O_CLOEXEC;
            assert_eq!(libc::pipe2(ends.as_mut_ptr(), flags), 0);
            (File::from_raw_fd(ends[0]), File::from_raw_fd(ends[1]))
        };
        for record in [
            "6,1042,98765,-;usb 1-1: new device\n SUBSYSTEM=usb\n",
            "3,1043,98766,-;NVRM: Xid (PCI:0000:3b:00): 79, pid='0', name=, GPU has fallen off the bus.\n",
            "3,1044,98767,-;NVRM: Xid (PCI:0000:3b:00): 31, pid=4711, name=python, Ch 8\n",
        ] {
            write.write_all(record.as_bytes()).unwrap();
        }
        let (stop, mut told) = (AtomicBool::new(false), Vec::new());
        follow_records(&mut read, &stop, &mut |line: XidLine| {
            told.push((line.xid, line.pid));
            stop.store(line.xid == 31, Ordering::Release);
        });
        assert_eq!(told, [(79, Some(0)), (31, Some(4711))]);
    }

    #[test]
    fn lines_that_are_added_are_told_and_old_ones_are_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("kernel.log");
        fs::write(&path, "NVRM: Xid (PCI:0000:01:00): 13, pid=1, name=old\n").unwrap();
        let (send, receive) = mpsc::channel();
        let _watcher = watch_kernel_log(&path, move |seen| send.send(seen).unwrap()).unwrap();
        let mut log = fs::OpenOptions::new().append(true).open(&path).unwrap();
        write!(log, "noise\nNVRM: Xid (PCI:0000:3b:00): 31, pid=47").unwrap();
        log.flush().unwrap();
        assert!(receive.recv_timeout(Duration::from_millis(100)).is_err(), "half a line");
        writeln!(log, "11, name=python, Ch 8").unwrap();
        let seen = receive.recv_timeout(Duration::from_secs(20)).unwrap();
        assert_eq!(
            (seen.gpu.as_str(), seen.fault, seen.pid),
            ("0000:3b:00", Fault::Xid(31), Some(4711))
        );
        // Turned over, and later cut: it goes on with what comes after.
        fs::rename(&path, dir.path().join("kernel.log.1")).unwrap();
        fs::write(&path, "NVRM: Xid (PCI:0000:3b:00): 48, pid=1, name=new\n").unwrap();
        let seen = receive.recv_timeout(Duration::from_secs(20)).unwrap();
        assert_eq!(seen.fault, Fault::Xid(48));
        let log = fs::OpenOptions::new().write(true).open(&path).unwrap();
        log.set_len(0).unwrap();
        // Shorter than what was there: it is known for cut whenever somebody looks.
        let mut log = fs::OpenOptions::new().append(true).open(&path).unwrap();
        writeln!(log, "NVRM: Xid (PCI:0000:3b:00): 13, pid=1, name=c").unwrap();
        let seen = receive.recv_timeout(Duration::from_secs(20)).unwrap();
        assert_eq!(seen.fault, Fault::Xid(13));
        let missing = watch_kernel_log(&dir.path().join("none"), |_| {}).unwrap_err();
        assert!(missing.to_string().contains("none"));
    }
}
