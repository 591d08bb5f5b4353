//! The attach probe: a child that initialises CUDA and retains the primary context, under a time
//! limit.
//!
//! After a client was killed in the middle of work, MPS can look healthy while every new client hangs
//! in `cuInit`. Nothing but a new client finds that out. The child is a process of its own because it
//! may hang for ever, and because the agent itself must never hold a CUDA context.

use std::ffi::{CStr, c_int, c_void};
use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::keeper::{ChildProgram, child_environment};
use crate::stuck;
use crate::sys::{self, ChildSetup};

/// What came of a probe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Attached {
    /// A client can attach.
    Yes {
        /// SMs of the GPU, as a client without a limit sees them.
        sms: u32,
        /// How long it took.
        took: Duration,
    },
    /// CUDA refused it.
    Refused {
        /// What failed and with which code.
        reason: String,
    },
    /// It did not come back in time.
    Hung,
}

/// Runs a probe on one GPU through its MPS server, as the user whose server it is.
pub fn run(
    child: &ChildProgram,
    uuid: &str,
    pipe_dir: Option<&Path>,
    user: Option<(u32, u32)>,
    limit: Duration,
) -> Attached {
    run_in(child, uuid, pipe_dir, None, user, limit)
}

/// As [`run`], in a static partition of the SMs.
pub fn run_in(
    child: &ChildProgram,
    uuid: &str,
    pipe_dir: Option<&Path>,
    partition: Option<&str>,
    user: Option<(u32, u32)>,
    limit: Duration,
) -> Attached {
    let what = format!("probe {uuid}");
    if stuck::holds(&what) {
        // The one before still hangs, and another one would only join it.
        return Attached::Hung;
    }
    let (program, arguments) = child;
    let mut command = Command::new(program);
    command
        .args(arguments)
        .arg("probe")
        .env_clear()
        .envs(child_environment())
        .env("CUDA_VISIBLE_DEVICES", uuid)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    if let Some(dir) = pipe_dir {
        command.env("CUDA_MPS_PIPE_DIRECTORY", dir);
    }
    if let Some(partition) = partition {
        command.env("CUDA_MPS_SM_PARTITION", partition);
    }
    let setup = ChildSetup { user, death_signal: Some(libc::SIGKILL), ..ChildSetup::default() };
    let began = Instant::now();
    let mut child = match sys::with_setup(&mut command, setup).spawn() {
        Ok(child) => child,
        Err(error) => {
            let reason = format!("{} cannot be started: {error}", program.display());
            return Attached::Refused { reason };
        }
    };
    let deadline = began + limit;
    let mut ended = None;
    while ended.is_none() && Instant::now() < deadline {
        ended = child.try_wait().ok().flatten();
        if ended.is_none() {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
    if ended.is_none() {
        stuck::end(child, &what);
        return Attached::Hung;
    }
    let mut said = String::new();
    if let Some(mut out) = child.stdout.take() {
        drop(out.read_to_string(&mut said));
    }
    match said.trim().strip_prefix("attached ").and_then(|sms| sms.parse().ok()) {
        Some(sms) => Attached::Yes { sms, took: began.elapsed() },
        None if said.trim().is_empty() => {
            Attached::Refused { reason: "the probe died without a word".into() }
        }
        None => Attached::Refused { reason: said.trim().to_owned() },
    }
}

const MULTIPROCESSOR_COUNT: c_int = 16;

/// The body of the child: says `attached SMS` or what failed.
pub fn attach() -> Result<u32, String> {
    // SAFETY: a zero-ended name; libcuda's initialisers are what is being probed.
    let library = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) };
    if library.is_null() {
        return Err("libcuda.so.1 cannot be opened; is the driver installed?".into());
    }
    let symbol = |name: &CStr| {
        // SAFETY: the library is open and stays so; the name ends in zero.
        let address = unsafe { libc::dlsym(library, name.as_ptr()) };
        if address.is_null() {
            return Err(format!("libcuda.so.1 lacks {}", name.to_string_lossy()));
        }
        Ok(address)
    };
    let done = |what: &str, code: c_int| {
        if code == 0 { Ok(()) } else { Err(format!("{what} failed with {code}")) }
    };
    let (init, get) = (symbol(c"cuInit")?, symbol(c"cuDeviceGet")?);
    let attribute = symbol(c"cuDeviceGetAttribute")?;
    let retain = symbol(c"cuDevicePrimaryCtxRetain")?;
    let release = symbol(c"cuDevicePrimaryCtxRelease_v2")?;
    let (mut device, mut sms) = (0, 0);
    let mut context: *mut c_void = std::ptr::null_mut();
    // SAFETY: the types are those of cuda.h for these names, and every pointer is to a local that
    // lives through its call.
    unsafe {
        let init: unsafe extern "C" fn(u32) -> c_int = std::mem::transmute(init);
        let get: unsafe extern "C" fn(*mut c_int, c_int) -> c_int = std::mem::transmute(get);
        let attribute: unsafe extern "C" fn(*mut c_int, c_int, c_int) -> c_int =
            std::mem::transmute(attribute);
        let retain: unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int =
            std::mem::transmute(retain);
        let release: unsafe extern "C" fn(c_int) -> c_int = std::mem::transmute(release);
        done("cuInit", init(0))?;
        done("cuDeviceGet", get(&raw mut device, 0))?;
        done("cuDeviceGetAttribute", attribute(&raw mut sms, MULTIPROCESSOR_COUNT, device))?;
        done("cuDevicePrimaryCtxRetain", retain(&raw mut context, device))?;
        done("cuDevicePrimaryCtxRelease", release(device))?;
    }
    u32::try_from(sms).map_err(|_| format!("cuDeviceGetAttribute says {sms} SMs"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> ChildProgram {
        ("/bin/sh".into(), vec!["-c".into(), script.into()])
    }

    #[test]
    fn answers_refusals_and_hangs_are_told_apart() {
        let probe =
            |script: &str, ms| run(&shell(script), "GPU-1", None, None, Duration::from_millis(ms));
        let Attached::Yes { sms, .. } = probe("echo attached 40", 5_000) else {
            panic!("attached")
        };
        assert_eq!(sms, 40);
        assert_eq!(
            probe("echo cuInit failed with 805", 5_000),
            Attached::Refused { reason: "cuInit failed with 805".into() }
        );
        assert!(matches!(probe("kill -9 $$", 5_000), Attached::Refused { .. }));
        let began = Instant::now();
        assert_eq!(probe("exec sleep 100", 200), Attached::Hung);
        assert!(began.elapsed() < Duration::from_secs(3));
    }
}
