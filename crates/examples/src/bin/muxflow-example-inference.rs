//! An inference server: requests over HTTP or from its own generator, and a latency histogram.

#![expect(clippy::print_stdout, reason = "a program for people at a terminal")]

use std::fs::File;
use std::io::{BufRead, BufReader, LineWriter, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use clap::Parser;
use muxflow_examples::driver::{Gpu, Timer};
use muxflow_examples::histogram::Histogram;
use muxflow_examples::network::{Loaded, Network};
use muxflow_examples::signals;

/// Serves a network of a known size.
#[derive(Debug, Parser)]
struct Arguments {
    /// resnet50, vgg16, densenet201, mobilenet-v2 or inception-v3.
    #[arg(long, default_value = "resnet50")]
    network: String,
    /// Images in a request.
    #[arg(long, default_value_t = 1)]
    batch: u32,
    /// Requests per second that it makes itself, at random moments; 0 makes none.
    #[arg(long, default_value_t = 20.0)]
    rate: f64,
    /// So many times more requests of its own while the file of `--burst-while` exists.
    #[arg(long, default_value_t = 5.0)]
    burst: f64,
    /// A file that makes a burst.
    #[arg(long)]
    burst_while: Option<PathBuf>,
    /// One line for each request: when it was answered (microseconds since the epoch), latency and
    /// device time in microseconds.
    #[arg(long)]
    record: Option<PathBuf>,
    /// Serve `GET /infer` and `GET /stats` here, such as 127.0.0.1:8900; port 0 picks one.
    #[arg(long)]
    listen: Option<String>,
    /// Stop after so many seconds; 0 goes on until it is stopped.
    #[arg(long, default_value_t = 10.0)]
    seconds: f64,
    /// Seed of the random moments.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

struct Server {
    gpu: &'static Gpu,
    model: Mutex<Loaded<'static>>,
    batch: u32,
    timer: Timer,
    histogram: Mutex<Histogram>,
    record: Option<Mutex<LineWriter<File>>>,
}

impl Server {
    /// One request that arrived at `arrival`; its latency in microseconds.
    fn infer(&self, arrival: Instant) -> anyhow::Result<f64> {
        let model = self.model.lock().unwrap_or_else(PoisonError::into_inner);
        self.gpu.mark(self.timer, false)?;
        model.pass(self.batch, 1)?;
        self.gpu.mark(self.timer, true)?;
        self.gpu.synchronize()?;
        let device_us = self.gpu.elapsed_us(self.timer)?;
        drop(model);
        let us = arrival.elapsed().as_secs_f64() * 1e6;
        if let Some(record) = &self.record {
            let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_micros();
            let mut record = record.lock().unwrap_or_else(PoisonError::into_inner);
            writeln!(record, "{now} {us:.0} {device_us:.0}")?;
        }
        self.histogram.lock().unwrap_or_else(PoisonError::into_inner).add(us);
        Ok(us)
    }

    fn line(&self) -> String {
        self.histogram.lock().unwrap_or_else(PoisonError::into_inner).line()
    }

    fn answer(&self, mut stream: TcpStream) -> anyhow::Result<()> {
        self.gpu.attach()?;
        let mut request = String::new();
        BufReader::new(stream.try_clone()?).read_line(&mut request)?;
        let body = if request.starts_with("GET /infer") {
            format!("{:.1}\n", self.infer(Instant::now())?)
        } else {
            self.line() + "\n"
        };
        let length = body.len();
        // In one piece: pieces would wait for each other's acknowledgement.
        let answer = format!(
            "HTTP/1.1 200 OK\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
        );
        stream.write_all(answer.as_bytes())?;
        Ok(())
    }
}

/// Waits between requests: exponential, from a seeded generator.
struct Moments(u64);

impl Moments {
    fn next_s(&mut self, rate: f64) -> f64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        #[expect(clippy::cast_precision_loss, reason = "53 bits")]
        let uniform = ((self.0 >> 11) as f64 + 0.5) / (1_u64 << 53) as f64;
        -uniform.ln() / rate
    }
}

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    signals::watch();
    let gpu: &'static Gpu = Box::leak(Box::new(Gpu::open()?));
    let model = Loaded::new(gpu, Network::find(&arguments.network)?)?;
    let record = match &arguments.record {
        Some(path) => {
            let file =
                File::create(path).with_context(|| format!("cannot write {}", path.display()))?;
            Some(Mutex::new(LineWriter::new(file)))
        }
        None => None,
    };
    let server = Arc::new(Server {
        gpu,
        model: Mutex::new(model),
        batch: arguments.batch,
        timer: gpu.timer()?,
        record,
        histogram: Mutex::new(Histogram::default()),
    });
    if let Some(address) = &arguments.listen {
        let listener =
            TcpListener::bind(address).with_context(|| format!("cannot listen on {address}"))?;
        println!("listening on {}", listener.local_addr()?);
        let server = Arc::clone(&server);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let server = Arc::clone(&server);
                std::thread::spawn(move || {
                    if let Err(error) = server.answer(stream) {
                        println!("a request failed: {error:#}");
                    }
                });
            }
        });
    }
    let began = Instant::now();
    let mut moments = Moments(arguments.seed);
    let mut next = began;
    let mut reported = began;
    let over = || arguments.seconds > 0.0 && began.elapsed().as_secs_f64() >= arguments.seconds;
    while !signals::stop_asked() && !over() {
        if arguments.rate > 0.0 {
            let bursts = arguments.burst_while.as_ref().is_some_and(|file| file.exists());
            let rate = if bursts { arguments.rate * arguments.burst } else { arguments.rate };
            next += Duration::from_secs_f64(moments.next_s(rate));
            let wait = next.saturating_duration_since(Instant::now());
            std::thread::sleep(wait);
            // Latency counts from the moment the request came, not from when its turn was.
            server.infer(next)?;
        } else {
            std::thread::sleep(Duration::from_millis(100));
        }
        if reported.elapsed() >= Duration::from_secs(5) {
            println!("{}", server.line());
            reported = Instant::now();
        }
    }
    let seconds = began.elapsed().as_secs_f64();
    let total = server.histogram.lock().unwrap_or_else(PoisonError::into_inner).total();
    #[expect(clippy::cast_precision_loss, reason = "counts of requests")]
    let rate = total as f64 / seconds;
    println!("{}; {rate:.1} requests per second", server.line());
    Ok(())
}
