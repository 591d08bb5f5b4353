//! The dashboard in a real browser, fed by a real `muxflow up` on emulated GPUs.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test fails by panicking, and says what it skips"
)]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use muxflow_agent::cgroup::Cgroups;
use muxflow_api::cluster::{PairingList, Summary};
use muxflow_api::service::ServiceList;
use muxflow_e2e::browser::{self, Browser};
use muxflow_e2e::build::{must, products, xcuda};
use muxflow_manager::client::{Client, Place};

const LONG: Duration = Duration::from_secs(120);
/// How light the page is, the colours of its charts, and every visible text whose contrast to what is
/// behind it is below 4.5, the limit of WCAG 2.2 (criterion 1.4.3, level AA) for text of this size.
const CONTRAST: &str = r"(() => {
  const parse = (text) => (text.match(/[\d.]+/g) ?? []).map(Number);
  const light = ([r, g, b]) => {
    const part = (value) => { const s = value / 255; return s <= 0.04045 ? s / 12.92 : ((s + 0.055) / 1.055) ** 2.4; };
    return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  };
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const color = parse(getComputedStyle(at).backgroundColor);
      if (color.length === 3 || color[3] > 0.99) return color;
    }
    return [255, 255, 255];
  };
  const poor = [];
  let texts = 0;
  for (const element of document.body.querySelectorAll('*')) {
    const own = [...element.childNodes].filter((n) => n.nodeType === 3).map((n) => n.data.trim()).join('');
    const box = element.getBoundingClientRect();
    if (!own || element.closest('svg, [hidden], .skip') || !box.width || box.right < 0) continue;
    texts += 1;
    const [a, b] = [light(parse(getComputedStyle(element).color)), light(behind(element))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) poor.push(`${own.slice(0, 30)}: ${ratio.toFixed(2)}`);
  }
  const fill = (name) => getComputedStyle(document.querySelector(name)).fill;
  return { poor, texts, back: light(behind(document.body)), colors: [fill('.a-online'), getComputedStyle(document.body).color] };
})()";
const TOKEN: &str = "a-token-of-this-test";

/// `muxflow up` inside an emulated node, with everything it may leave behind.
struct World {
    dir: tempfile::TempDir,
    label: String,
    built: PathBuf,
    node: Child,
    port: u16,
    asking: Arc<AtomicBool>,
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

impl World {
    fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let label = format!("muxflow-page-{}", std::process::id());
        let (built, port) = (products().to_owned(), free_port());
        let node = dir.path().join("node");
        let text = format!(
            "state_dir = '{0}/state'\nrun_dir = '/dev/shm/{label}'\nlisten = '127.0.0.1:{port}'\n\
             [[token]]\nuser = 'root'\ntoken = '{TOKEN}'\n[profiler]\nwindow_s = 2\nwait_s = 1\n\
             [agent]\ninterposer = '{1}'\nmetrics = ''\nkernel_log = '{0}/node/kernel.log'\n\
             cgroup_parent = '{label}'\npass_env = ['MUXFLOW_EMULATED_DIR']\n",
            dir.path().display(),
            xcuda().display(),
        );
        std::fs::write(dir.path().join("up.toml"), text).unwrap();
        std::fs::create_dir(&node).unwrap();
        std::fs::write(node.join("kernel.log"), "").unwrap();
        let log = std::fs::File::create(dir.path().join("up.log")).unwrap();
        let node = Command::new(built.join("muxflow-emulated-node"))
            .args(["--gpus", "t4x4", "--time-factor", "0.5", "--dir"])
            .arg(&node)
            .arg("--")
            .arg(built.join("muxflow"))
            .args(["up", "--config"])
            .arg(dir.path().join("up.toml"))
            .env("MUXFLOW_TEST_LABEL", &label)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        let asking = Arc::new(AtomicBool::new(true));
        let world = World { dir, label, built, node, port, asking };
        world.until("the manager answers", || TcpStream::connect(("127.0.0.1", port)).is_ok());
        world
    }

    fn until(&self, what: &str, holds: impl Fn() -> bool) {
        let deadline = Instant::now() + LONG;
        while !holds() {
            let log = std::fs::read_to_string(self.dir.path().join("up.log")).unwrap_or_default();
            assert!(Instant::now() < deadline, "never: {what}\n{log}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn muxflow(&self, words: &[&str]) -> String {
        let output = Command::new(self.built.join("muxflow"))
            .args(words)
            .env("MUXFLOW_SOCKET", format!("/dev/shm/{}/manager.sock", self.label))
            .output()
            .unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "muxflow {words:?}: {errors}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    fn page(&self) -> String {
        format!("http://127.0.0.1:{}/dashboard#token={TOKEN}", self.port)
    }

    /// Two services with requests, jobs beside them, and one error.
    fn fill(&self) {
        for (name, replicas) in [("ranking", 2), ("vision", 1)] {
            let port = free_port();
            let declared = serde_json::json!({
                "name": name, "port": port, "min_replicas": replicas, "max_replicas": replicas, "slo_ms": 120,
                "command": [self.built.join("muxflow-example-inference"), "--network", "resnet50", "--batch", "4",
                    "--rate", "0", "--seconds", "0", "--listen", "127.0.0.1:{port}"],
                "health": { "every_ms": 250 },
            });
            let path = self.dir.path().join(format!("{name}.json"));
            std::fs::write(&path, declared.to_string()).unwrap();
            self.muxflow(&["service", "declare", path.to_str().unwrap()]);
            let asking = Arc::clone(&self.asking);
            std::thread::spawn(move || {
                while asking.load(Ordering::Relaxed) {
                    ask(port);
                    std::thread::sleep(Duration::from_millis(70));
                }
            });
        }
        self.until("replicas serve", || {
            let list = self.muxflow(&["service", "list"]);
            list.contains("2 of 2") && list.contains("1 of 1")
        });
        let trainer = self.built.join("muxflow-example-training");
        for index in 0..6 {
            let name = format!("train-{index}");
            let words = ["submit", "--name", &name, "--", trainer.to_str().unwrap(), "--network"];
            self.muxflow(
                &[&words[..], &["mobilenet-v2", "--batch", "256", "--iterations", "0"]].concat(),
            );
        }
        self.until("jobs run", || self.muxflow(&["jobs"]).matches("running").count() >= 2);
    }

    fn fault(&self, words: &[&str]) {
        let mut fault = Command::new(self.built.join("muxflow-emulated-fault"));
        must(fault.arg("--dir").arg(self.dir.path().join("node")).args(words));
    }
}

/// The page says what the API says. Both change all the time: at one moment they must be the same.
fn says_what_the_api_says(
    page: &mut Browser,
    what: &str,
    shown: &str,
    told: impl Fn() -> Option<String>,
) {
    let deadline = Instant::now() + LONG;
    loop {
        let (told, shown) = (told(), page.value(shown));
        if told.as_deref() == shown.as_str() && told.is_some() {
            println!("MEASURED {what}: {shown}");
            return;
        }
        assert!(Instant::now() < deadline, "{what}: the page has {shown}, the API {told:?}");
        std::thread::sleep(Duration::from_millis(200));
    }
}

/// One utilisation, one latency against its SLO, one pair with predicted and seen speed.
fn numbers(world: &World, page: &mut Browser) {
    let socket = Path::new("/dev/shm").join(&world.label).join("manager.sock");
    let api = Client::new(Place::Socket(socket)).unwrap();
    let tile = "[...document.querySelectorAll('#tiles .tile')].find((tile) => tile.querySelector('dt').innerText === 'GPU utilisation').querySelector('dd').firstChild.data";
    says_what_the_api_says(page, "utilisation", tile, || {
        let summary: Summary = api.get("/v1/summary").unwrap();
        summary.gpu_util_pct.map(|pct| format!("{pct:.0} %"))
    });
    let latency = "[...document.querySelectorAll('#service-list tbody tr')].find((row) => row.cells[0].innerText === 'vision').cells[5].innerText.trim()";
    says_what_the_api_says(page, "latency", latency, || {
        let list: ServiceList = api.get("/v1/services").unwrap();
        let vision = list.items.iter().find(|service| service.declared.name == "vision")?;
        Some(format!("{:.1} ms of 120 ms", vision.latency.p99_ms?))
    });
    let row = "[...document.querySelectorAll('#pairing-list tbody tr')].map((row) => [...row.cells].map((cell) => cell.innerText.trim()))";
    let pair = format!(
        "{row}.filter((c) => c[1] !== 'none' && c[4] !== 'not known yet' && c[5] !== 'not known yet').map((c) => `${{c[1]}} ${{c[2]}} ${{c[4]}} ${{c[5]}}`)[0] ?? ''"
    );
    says_what_the_api_says(page, "predicted and seen speed", &pair, || {
        let list: PairingList = api.get("/v1/pairings").unwrap();
        list.items.iter().find_map(|pair| {
            let (service, seen) = (pair.service.as_ref()?, pair.seen_speed?);
            Some(format!("{service} {} {:.2} {seen:.2}", pair.job, pair.predicted_speed?))
        })
    });
}

fn ask(port: u16) -> Option<()> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(5))).ok()?;
    stream.write_all(b"GET /infer HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").ok()?;
    stream.read_to_end(&mut Vec::new()).ok().map(drop)
}

impl Drop for World {
    fn drop(&mut self) {
        self.asking.store(false, Ordering::Relaxed);
        // Services and MPS outlive a manager by design; the test ends everything that has its label.
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            let mut left = 0;
            for entry in std::fs::read_dir("/proc").unwrap().flatten() {
                let Some(pid) = entry.file_name().to_str().and_then(|t| t.parse::<i32>().ok())
                else {
                    continue;
                };
                let named = ["environ", "cmdline", "cgroup"].iter().any(|file| {
                    let text = std::fs::read(entry.path().join(file)).unwrap_or_default();
                    String::from_utf8_lossy(&text).contains(&self.label)
                        || String::from_utf8_lossy(&text)
                            .contains(self.dir.path().to_str().unwrap())
                });
                if named && pid != i32::try_from(std::process::id()).unwrap() {
                    left += 1;
                    // SAFETY: a plain system call; the process carries this test's label.
                    unsafe { libc::kill(pid, libc::SIGKILL) };
                }
            }
            drop(self.node.try_wait());
            if left == 0 || Instant::now() > deadline {
                break;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        drop(self.node.wait());
        drop(std::fs::remove_dir_all(Path::new("/dev/shm").join(&self.label)));
        Cgroups::detect(&self.label).remove_empty();
    }
}

/// The browser, or a loud word that it is missing; with `CI` set that is a failure.
fn browser(world: &World) -> Option<Browser> {
    match browser::program() {
        Some(program) => Some(Browser::start(program, &world.dir.path().join("browser"))),
        None => {
            let text = "no Chromium on this machine: the dashboard was not tested; apt-get install chromium";
            assert!(std::env::var_os("CI").is_none(), "{text}");
            println!("SKIPPED: {text}");
            None
        }
    }
}

/// Who reads a chart by key keeps it, and the moment that is read, while it is drawn anew.
fn a_chart_with_the_focus_goes_on(page: &mut Browser) {
    page.value("document.querySelector('#gpu-list svg').focus()");
    page.press("ArrowLeft", 37);
    let line = "document.querySelector('#gpu-list svg .a-online').getAttribute('d')";
    let before = page.value(line);
    page.wait("the chart goes on", &format!("{line} !== {before}"));
    let holder = page.value("document.activeElement.dataset.focus");
    assert_eq!(holder, "GPU 0", "the focus stays");
    let caption = page.value("document.querySelector('#gpu-list figcaption').innerText");
    let read = caption.as_str().unwrap();
    assert!(read.as_bytes().get(2) == Some(&b':'), "a moment is read still: {read}");
    page.value("document.activeElement.blur()");
}

/// What runs stays in sight, and what is left out is counted.
fn a_long_queue_is_cut(world: &World, page: &mut Browser) {
    let trainer = world.built.join("muxflow-example-training");
    let words = ["submit", "--array", "0-249", "--", trainer.to_str().unwrap(), "--iterations"];
    world.muxflow(&[&words[..], &["0"]].concat());
    page.wait(
        "the rest is counted",
        "/… and \\d+ more; muxflow jobs/.test(document.getElementById('job-list').innerText)",
    );
    page.wait(
        "what runs comes first",
        "document.querySelector('#job-list tbody tr').cells[3].innerText === 'running'",
    );
}

#[test]
fn the_page_shows_what_runs_and_can_be_used_by_keyboard_on_a_small_screen() {
    let world = World::start();
    let Some(mut page) = browser(&world) else { return };
    page.appear(1200, 900, false);
    page.open(&format!("http://127.0.0.1:{}/", world.port));
    page.wait("it asks for a token", "document.getElementById('sign-in')?.hidden === false");
    page.errors.clear(); // A browser logs every 401.
    page.open(&world.page());
    page.wait("it is there", "document.body.dataset.ready === 'yes'");
    let text = page.value("document.body.innerText");
    let says = |text: &serde_json::Value, what: &str| text.as_str().unwrap().contains(what);
    assert!(says(&text, "No service is declared") && says(&text, "The queue is empty"), "{text}");
    assert!(says(&text, "muxflow submit"), "empty states say what to do next: {text}");
    world.fill();
    page.wait(
        "services are there",
        "document.querySelectorAll('#service-list tbody tr').length === 2",
    );
    page.wait(
        "pairings are there",
        "document.querySelectorAll('#pairing-list tbody tr').length >= 2",
    );
    page.wait(
        "jobs wait and say why",
        "/train-5/.test(document.getElementById('job-list').innerText)",
    );
    page.wait("GPUs have a past", "document.querySelectorAll('#gpu-list .a-online').length === 4");
    page.wait(
        "latency is held against the SLO",
        "/of 120 ms/.test(document.getElementById('service-list').innerText)",
    );
    numbers(&world, &mut page);
    // A GPU with a service and a job: a throttled clock makes the job leave it.
    page.wait(
        "a job is beside a service",
        "[...document.querySelectorAll('#pairing-list tbody tr')].some((row) => row.cells[1].innerText !== 'none')",
    );
    let paired = page.value(
        "[...document.querySelectorAll('#pairing-list tbody tr')].find((row) => row.cells[1].innerText !== 'none').cells[0].innerText",
    );
    let gpu = paired.as_str().unwrap().trim_start_matches("GPU ").to_owned();
    world.fault(&["--gpu", &gpu, "throttle", "600"]);
    page.wait("an eviction is on the time line", &format!(
        "[...document.querySelectorAll('#event-list li')].some((row) => row.children[1]?.innerText === 'eviction' && row.children[2].innerText.startsWith('GPU {gpu}: job-'))"
    ));
    // By keyboard: from the skip link through the sections to the charts and filters.
    page.value("document.activeElement.blur()");
    let mut visited = Vec::new();
    for _ in 0..24 {
        page.press("Tab", 9);
        let at = page.value("(document.activeElement.textContent || '').trim().slice(0, 20) + '|' + document.activeElement.tagName + '|' + document.activeElement.id");
        visited.push(at.as_str().unwrap().to_owned());
    }
    assert!(visited[0].starts_with("Skip"), "{visited:?}");
    assert!(
        visited.iter().any(|at| at.contains("|svg|")),
        "charts can be read by key: {visited:?}"
    );
    assert!(visited.iter().any(|at| at.contains("kind-")), "filters can be reached: {visited:?}");
    let mut backs = Vec::new();
    for (width, dark) in [(1200, false), (1200, true), (360, false), (360, true)] {
        page.appear(width, 800, dark);
        let seen = page.value(CONTRAST);
        assert_eq!(seen["poor"], serde_json::json!([]), "hard to read, dark: {dark}");
        assert!(seen["texts"].as_u64().unwrap() > 50, "{seen}");
        let light = seen["back"].as_f64().unwrap();
        assert!(if dark { light < 0.1 } else { light > 0.8 }, "dark: {dark}, {seen}");
        backs.push(seen["colors"].clone());
        let wide = page
            .value("document.documentElement.scrollWidth - document.documentElement.clientWidth");
        assert_eq!(wide, 0, "nothing is wider than {width} pixels");
    }
    assert_ne!(backs[0], backs[1], "dark has other colours");
    assert_eq!((&backs[0], &backs[1]), (&backs[2], &backs[3]), "whatever the size of the screen");
    page.appear(1200, 900, false);
    a_chart_with_the_focus_goes_on(&mut page);
    a_long_queue_is_cut(&world, &mut page);
    assert!(page.errors.is_empty(), "{:#?}", page.errors);
}

#[test]
#[ignore = "writes docs/dashboard-*.png: cargo xtask screenshots"]
fn screenshots() {
    let world = World::start();
    let mut page = browser(&world).expect("Chromium is needed: apt-get install chromium");
    world.fill();
    page.open(&world.page());
    page.wait("it is there", "document.body.dataset.ready === 'yes'");
    // Long enough for the charts to show something.
    std::thread::sleep(Duration::from_secs(25));
    world.fault(&["--gpu", "3", "throttle", "600"]);
    std::thread::sleep(Duration::from_secs(5));
    world.fault(&["--gpu", "3", "throttle", "0"]);
    std::thread::sleep(Duration::from_secs(15));
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    for (name, width, height, dark) in
        [("light", 1200, 1000, false), ("dark", 1200, 1000, true), ("small", 390, 844, false)]
    {
        page.appear(width, height, dark);
        std::thread::sleep(Duration::from_millis(1500));
        let data = page.picture();
        let path = docs.join(format!("dashboard-{name}.png"));
        let mut decode = Command::new("base64");
        decode.arg("-d").stdin(Stdio::piped());
        let out = std::fs::File::create(&path).unwrap();
        let mut child = decode.stdout(out).spawn().unwrap();
        child.stdin.take().unwrap().write_all(data.as_bytes()).unwrap();
        assert!(child.wait().unwrap().success());
        println!("{}", path.display());
    }
}
