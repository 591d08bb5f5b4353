//! A headless Chromium, spoken to over its debugging pipe: no driver program and no port needed.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

const LIMIT: Duration = Duration::from_secs(60);

/// A browser with one page.
#[derive(Debug)]
pub struct Browser {
    child: Child,
    to: File,
    from: Receiver<Value>,
    session: Option<String>,
    next: u64,
    /// What the page wrote to its console as an error, and exceptions that nobody caught.
    pub errors: Vec<String>,
}

fn pipe() -> (OwnedFd, OwnedFd) {
    let mut ends = [0; 2];
    // SAFETY: the kernel writes two descriptors.
    let made = unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) };
    assert_eq!(made, 0, "a pipe");
    // SAFETY: the kernel just gave us both.
    unsafe { (OwnedFd::from_raw_fd(ends[0]), OwnedFd::from_raw_fd(ends[1])) }
}

/// The program, by the names that distributions give it.
#[must_use]
pub fn program() -> Option<&'static str> {
    ["chromium", "chromium-browser", "google-chrome"].into_iter().find(|name| {
        let version = Command::new(name).arg("--version").stdin(Stdio::null()).output();
        version.is_ok_and(|output| output.status.success())
    })
}

impl Browser {
    /// Starts one whose profile is in `dir`.
    pub fn start(program: &str, dir: &Path) -> Self {
        let (commands, to) = pipe();
        let (from, answers) = pipe();
        let mut command = Command::new(program);
        command
            .args(["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"])
            .args(["--no-first-run", "--hide-scrollbars", "--remote-debugging-pipe"])
            .args(["--force-color-profile=srgb", "--disable-background-networking"])
            .arg(format!("--user-data-dir={}", dir.display()))
            .arg("about:blank")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0);
        let (read, write) = (commands.as_raw_fd(), answers.as_raw_fd());
        let hand_over = move || {
            // SAFETY: plain numbers of open descriptors; first out of the way of 3 and 4.
            let done = unsafe {
                let (read, write) =
                    (libc::fcntl(read, libc::F_DUPFD, 10), libc::fcntl(write, libc::F_DUPFD, 10));
                libc::dup2(read, 3) >= 0 && libc::dup2(write, 4) >= 0
            };
            if done { Ok(()) } else { Err(std::io::Error::last_os_error()) }
        };
        // SAFETY: only system calls between fork and exec.
        let child = unsafe { command.pre_exec(hand_over) }.spawn().expect("the browser starts");
        let (tell, heard) = channel();
        std::thread::spawn(move || {
            let mut reader = BufReader::new(File::from(from));
            loop {
                let mut message = Vec::new();
                if !matches!(reader.read_until(0, &mut message), Ok(count) if count > 0) {
                    return;
                }
                message.pop();
                let value = serde_json::from_slice(&message).unwrap_or(Value::Null);
                if tell.send(value).is_err() {
                    return;
                }
            }
        });
        let mut browser = Browser {
            child,
            to: File::from(to),
            from: heard,
            session: None,
            next: 0,
            errors: Vec::new(),
        };
        let target = browser.call("Target.createTarget", json!({ "url": "about:blank" }));
        let attach = json!({ "targetId": target["targetId"], "flatten": true });
        let session = browser.call("Target.attachToTarget", attach);
        browser.session = session["sessionId"].as_str().map(str::to_owned);
        for domain in ["Page.enable", "Runtime.enable", "Log.enable"] {
            browser.call(domain, json!({}));
        }
        browser
    }

    /// One command, and its result.
    pub fn call(&mut self, method: &str, params: Value) -> Value {
        self.next += 1;
        let mut message = json!({ "id": self.next, "method": method, "params": params });
        if let Some(session) = &self.session {
            message["sessionId"] = json!(session);
        }
        let mut bytes = message.to_string().into_bytes();
        bytes.push(0);
        self.to.write_all(&bytes).expect("the browser listens");
        let deadline = Instant::now() + LIMIT;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let heard =
                self.from.recv_timeout(left).unwrap_or_else(|_| panic!("no answer to {method}"));
            if heard["id"] == self.next {
                assert!(heard["error"].is_null(), "{method}: {}", heard["error"]);
                return heard["result"].clone();
            }
            self.note(&heard);
        }
    }

    fn note(&mut self, heard: &Value) {
        let params = &heard["params"];
        match heard["method"].as_str() {
            Some("Runtime.exceptionThrown") => {
                self.errors.push(params["exceptionDetails"].to_string());
            }
            Some("Log.entryAdded") if params["entry"]["level"] == "error" => {
                self.errors.push(params["entry"].to_string());
            }
            Some("Runtime.consoleAPICalled") if params["type"] == "error" => {
                self.errors.push(params["args"].to_string());
            }
            _ => {}
        }
    }

    /// Goes somewhere.
    pub fn open(&mut self, url: &str) {
        self.call("Page.navigate", json!({ "url": url }));
    }

    /// The value of an expression in the page.
    pub fn value(&mut self, expression: &str) -> Value {
        let params = json!({ "expression": expression, "returnByValue": true });
        let result = self.call("Runtime.evaluate", params);
        assert!(result["exceptionDetails"].is_null(), "{expression}: {result}");
        result["result"]["value"].clone()
    }

    /// Waits until an expression is true.
    pub fn wait(&mut self, what: &str, expression: &str) {
        let deadline = Instant::now() + LIMIT;
        while self.value(expression) != Value::Bool(true) {
            assert!(
                Instant::now() < deadline,
                "never: {what}: {}",
                self.value("document.body.innerText")
            );
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// The size of the window, and whether people like it dark.
    pub fn appear(&mut self, width: u32, height: u32, dark: bool) {
        let size = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600 });
        self.call("Emulation.setDeviceMetricsOverride", size);
        let scheme = if dark { "dark" } else { "light" };
        let media = json!({ "features": [{ "name": "prefers-color-scheme", "value": scheme }] });
        self.call("Emulation.setEmulatedMedia", media);
    }

    /// Presses a key.
    pub fn press(&mut self, key: &str, code: u32) {
        for kind in ["rawKeyDown", "keyUp"] {
            let params =
                json!({ "type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code });
            self.call("Input.dispatchKeyEvent", params);
        }
    }

    /// A picture of the whole page, as PNG in base64.
    pub fn picture(&mut self) -> String {
        let params =
            json!({ "format": "png", "captureBeyondViewport": true, "optimizeForSpeed": false });
        let shot = self.call("Page.captureScreenshot", params);
        shot["data"].as_str().unwrap_or_default().to_owned()
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // SAFETY: a plain system call; the group is the one that this browser leads.
        unsafe { libc::kill(-i32::try_from(self.child.id()).unwrap_or(0), libc::SIGKILL) };
        drop(self.child.wait());
    }
}
