//! Builds what the tests run: the interposer, the stub driver and the C client.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use muxflow_abi::driver::DRIVER;

/// The workspace's target directory.
#[must_use]
pub fn target() -> PathBuf {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| workspace.join("target"), PathBuf::from)
}

fn sources() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("c")
}

/// Where the tests build to.
#[must_use]
pub fn scratch() -> PathBuf {
    let directory = target().join("e2e");
    fs::create_dir_all(&directory).expect("target/e2e can be made");
    directory
}

/// Runs a step alone among all test programs.
fn locked<T>(step: impl FnOnce() -> T) -> T {
    let lock = File::create(scratch().join("lock")).expect("a lock file");
    lock.lock().expect("the lock");
    step()
}

/// Cargo without what it has told this test about its package: build scripts that ask for these
/// variables would run again, and everything above them be compiled again, at each change of who asks.
#[must_use]
pub fn cargo() -> Command {
    let mut cargo = Command::new(env!("CARGO"));
    let told = |name: &str| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_");
    for name in std::env::vars_os().filter_map(|(name, _)| name.into_string().ok()) {
        if told(&name) {
            cargo.env_remove(name);
        }
    }
    cargo
}

/// Runs a command that must succeed.
pub fn must(command: &mut Command) {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(
        output.status.success(),
        "{command:?}: {}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

/// Builds the program with everything that it and the tests start beside it, as `cargo xtask demo`
/// does; the directory that they are in. One list for all tests: each other choice of packages has
/// other features, and cargo would compile all that they share once more.
pub fn products() -> &'static Path {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| {
        let emulated = ["emulated-gpu", "emulated-cuda", "emulated-nvml", "emulated-dcgm"];
        let parts = ["cli", "agent", "examples"].into_iter().chain(emulated);
        let mut build = cargo();
        build.args(["build", "--quiet"]).current_dir(env!("CARGO_MANIFEST_DIR"));
        for part in parts {
            build.args(["-p", &format!("muxflow-{part}")]);
        }
        must(&mut build);
        target().join("debug").canonicalize().expect("target/debug was built")
    })
}

/// The interposer, built in the profile that ships.
pub fn xcuda() -> &'static Path {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| {
        if let Some(path) = std::env::var_os("MUXFLOW_XCUDA") {
            return PathBuf::from(path);
        }
        locked(|| {
            must(
                cargo()
                    .args(["build", "--quiet", "--profile", "xcuda", "-p", "muxflow-xcuda"])
                    .current_dir(env!("CARGO_MANIFEST_DIR")),
            );
        });
        target().join("xcuda/libxcuda.so").canonicalize().expect("libxcuda.so was built")
    })
}

/// The stub driver without some of its functions, as a directory with a `libcuda.so.1`.
pub fn stub(name: &str, without: &[&str]) -> PathBuf {
    let directory = scratch().join(name);
    locked(|| {
        fs::create_dir_all(&directory).expect("a directory for the stub");
        let source = fs::read_to_string(sources().join("stub.c")).expect("stub.c");
        let lacks = |line: &&str| {
            !without.iter().any(|symbol| line.starts_with(&format!("API int {symbol}(")))
        };
        let source: String = source.lines().filter(lacks).flat_map(|line| [line, "\n"]).collect();
        let written = |symbol: &str| {
            source.contains(&format!("API int {symbol}("))
                || source.contains(&format!("OUT1({symbol})"))
        };
        let mut rest = String::new();
        let mut table = String::from("const struct row stub_rows[] = {\n");
        for row in DRIVER.iter().filter(|row| !without.contains(&row.symbol)) {
            if !written(row.symbol) {
                writeln!(rest, "API int {}(void) {{ return 0; }}", row.symbol).expect("a string");
            }
            let per_thread = i32::from(row.per_thread);
            let (symbol, base, since) = (row.symbol, row.base, row.since);
            writeln!(table, "{{\"{symbol}\", \"{base}\", {per_thread}, {since}}},")
                .expect("a string");
        }
        table.push_str("{0, 0, 0, 0}};\n");
        let generated = directory.join("stub.c");
        let text = source.clone() + &rest + &table;
        let library = directory.join("libcuda.so.1");
        let newer = fs::read_to_string(&generated).is_ok_and(|old| old == text) && library.exists();
        if newer {
            return;
        }
        fs::write(&generated, text).expect("stub.c");
        must(
            Command::new("cc")
                .args(["-shared", "-fPIC", "-O2", "-g", "-fvisibility=hidden", "-Wl,-Bsymbolic"])
                .args(["-Wl,-soname,libcuda.so.1", "-fno-builtin", "-w", "-o"])
                .arg(&library)
                .arg(&generated)
                .args(["-lpthread", "-ldl"]),
        );
        let link = directory.join("libcuda.so");
        if !link.exists() {
            std::os::unix::fs::symlink("libcuda.so.1", link).expect("libcuda.so");
        }
    });
    directory
}

fn modified(path: &Path) -> Option<std::time::SystemTime> {
    fs::metadata(path).and_then(|data| data.modified()).ok()
}

/// The whole stub driver.
pub fn stub_driver() -> &'static Path {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| stub("stub", &[]))
}

/// A C program of `c/`, compiled with more arguments.
pub fn client(name: &str, arguments: &[&str]) -> PathBuf {
    let label: String =
        arguments.iter().flat_map(|a| a.chars()).filter(char::is_ascii_alphanumeric).collect();
    let program = scratch().join(format!("{name}-{}", &label[..label.len().min(80)]));
    compile(&sources().join(format!("{name}.c")), &program, arguments);
    program
}

/// A C program of the emulator's own tests.
pub fn emulator_client(name: &str) -> PathBuf {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../emulated-gpu/tests/c");
    let program = scratch().join(format!("emulator-{name}"));
    compile(&sources.join(format!("{name}.c")), &program, &[]);
    program
}

fn compile(source: &Path, program: &Path, arguments: &[&str]) {
    locked(|| {
        if modified(program) > modified(source) {
            return;
        }
        must(
            Command::new("cc")
                .args(["-O2", "-g", "-w", "-o"])
                .arg(program)
                .arg(source)
                .args(arguments)
                .args(["-ldl", "-lpthread"]),
        );
    });
}
