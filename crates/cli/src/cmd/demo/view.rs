//! What a person sees while a phase runs: a few lines redrawn on a terminal, plain lines elsewhere.

use std::fmt::Write as _;
use std::io::{IsTerminal as _, Write as _};
use std::time::{Duration, Instant};

/// Between two frames on a terminal, and between two plain lines.
const FRAME: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(5));

/// One GPU at one moment.
#[derive(Debug, Clone)]
pub(super) struct GpuGlance {
    pub(super) index: usize,
    pub(super) health: String,
    pub(super) service: Option<String>,
    pub(super) rate_per_s: f64,
    pub(super) p99_ms: Option<f64>,
    pub(super) slo_ms: Option<f64>,
    pub(super) sm_activity_pct: f64,
    pub(super) job: Option<String>,
    pub(super) budget: f64,
    pub(super) gated: bool,
}

/// Everything at one moment.
#[derive(Debug, Clone)]
pub(super) struct Glance {
    pub(super) at_s: f64,
    pub(super) gpus: Vec<GpuGlance>,
    pub(super) iterations: u64,
    pub(super) solo_per_s: Option<f64>,
}

/// The view of one phase.
#[derive(Debug)]
pub(super) struct View {
    title: &'static str,
    day_s: f64,
    terminal: bool,
    drawn: usize,
    next: Instant,
    events: Vec<String>,
    at_s: f64,
}

/// A line of the table without its bar, and the lengths that the bar may have.
const WITHOUT_BAR: usize = 73;
const BAR: (usize, usize) = (5, 20);

fn bar(pct: f64, length: usize) -> String {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "0 to the length of a bar"
    )]
    let full = (pct.clamp(0.0, 100.0) / 100.0 * length as f64).round() as usize;
    format!("{}{}", "█".repeat(full), "░".repeat(length - full))
}

/// Columns of the terminal; 80 when it does not tell.
fn columns() -> usize {
    let mut size = libc::winsize { ws_row: 0, ws_col: 0, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: the call fills a structure that lives through it, or leaves it as it is.
    unsafe { libc::ioctl(libc::STDOUT_FILENO, libc::TIOCGWINSZ, &raw mut size) };
    if size.ws_col == 0 { 80 } else { usize::from(size.ws_col) }
}

/// Each line cut to the width: one that the terminal breaks in two would not be erased whole.
fn cut(frame: &str, width: usize) -> String {
    let line = |line: &str| line.chars().take(width).chain(['\n']).collect::<String>();
    frame.lines().map(line).collect()
}

impl View {
    pub(super) fn new(title: &'static str, day_s: f64) -> Self {
        let terminal = std::io::stdout().is_terminal();
        View {
            title,
            day_s,
            terminal,
            drawn: 0,
            next: Instant::now(),
            events: Vec::new(),
            at_s: 0.0,
        }
    }

    fn clock(&self, at_s: f64) -> String {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "minutes of a day"
        )]
        let minutes = (at_s / self.day_s * 24.0 * 60.0) as u32;
        format!("{:02}:{:02}", minutes / 60 % 24, minutes % 60)
    }

    /// A line that stays.
    pub(super) fn line(&mut self, text: &str) {
        self.erase();
        put(&format!("  {text}\n"));
    }

    /// Something that happened.
    pub(super) fn event(&mut self, text: &str) {
        let line = format!("{}  {text}", self.clock(self.at_s));
        if self.terminal {
            self.events.push(line);
            let old = self.events.len().saturating_sub(4);
            self.events.drain(..old);
        } else {
            put(&format!("  {line}\n"));
        }
    }

    /// Shows this moment, if a frame is due.
    pub(super) fn show(&mut self, glance: &Glance) {
        self.at_s = glance.at_s;
        if Instant::now() < self.next {
            return;
        }
        self.next = Instant::now() + if self.terminal { FRAME.0 } else { FRAME.1 };
        if !self.terminal {
            put(&self.plain(glance));
            return;
        }
        let width = columns();
        let frame = cut(&self.frame(glance, width), width);
        self.erase();
        self.drawn = frame.lines().count();
        put(&frame);
    }

    fn plain(&self, glance: &Glance) -> String {
        let mut text = format!("  {}", self.clock(glance.at_s));
        for gpu in &glance.gpus {
            let p99 = gpu.p99_ms.map_or_else(|| "-".into(), |ms| format!("{ms:.0} ms"));
            let job = gpu.job.as_deref().unwrap_or("-");
            let _written = write!(
                text,
                "  | GPU {} {} {:.0}/s p99 {p99} SM {:.0} % {job}",
                gpu.index, gpu.health, gpu.rate_per_s, gpu.sm_activity_pct
            );
        }
        text.push('\n');
        text
    }

    fn frame(&self, glance: &Glance, width: usize) -> String {
        let length = width.saturating_sub(WITHOUT_BAR).clamp(BAR.0, BAR.1);
        // The bar and the number after it.
        let cell = length + 6;
        let mut text = format!(
            "  {} · {} of the day · {} offline iterations{}\n",
            self.title,
            self.clock(glance.at_s),
            glance.iterations,
            glance.solo_per_s.map_or_else(String::new, |rate| format!(" ({rate:.1}/s alone)")),
        );
        let _written = writeln!(
            text,
            "  GPU  {:<9} {:<10} req/s {:>7} {:>7}  {:<cell$}  {:<8} gate",
            "state", "service", "p99", "SLO", "SM activity", "job",
        );
        for gpu in &glance.gpus {
            let ms =
                |value: Option<f64>| value.map_or_else(|| "-".into(), |v| format!("{v:.0} ms"));
            let gate = match (&gpu.job, gpu.gated) {
                (Some(_), true) => format!("{:.0} %", gpu.budget * 100.0),
                (Some(_), false) => "none".into(),
                (None, _) => String::new(),
            };
            let _written = writeln!(
                text,
                "  {:<4} {:<9} {:<10} {:>5.1} {:>7} {:>7}  {} {:>3.0} %  {:<8} {gate}",
                gpu.index,
                gpu.health,
                gpu.service.as_deref().unwrap_or("-"),
                gpu.rate_per_s,
                ms(gpu.p99_ms),
                ms(gpu.slo_ms),
                bar(gpu.sm_activity_pct, length),
                gpu.sm_activity_pct,
                gpu.job.as_deref().unwrap_or("-"),
            );
        }
        for event in &self.events {
            let _written = writeln!(text, "  {event}");
        }
        text
    }

    fn erase(&mut self) {
        if self.drawn > 0 {
            put(&format!("\x1b[{}F\x1b[J", self.drawn));
            self.drawn = 0;
        }
    }
}

/// A terminal that is gone is no reason to stop the cleaning up.
fn put(text: &str) {
    let mut out = std::io::stdout().lock();
    drop(out.write_all(text.as_bytes()));
    drop(out.flush());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_fit_a_terminal() {
        let view = View { terminal: true, ..View::new("with MuxFlow", 40.0) };
        let gpu = GpuGlance {
            index: 3,
            health: "Overlimit".into(),
            service: Some("ranking-1".into()),
            rate_per_s: 123.4,
            p99_ms: Some(1234.5),
            slo_ms: Some(40.0),
            sm_activity_pct: 100.0,
            job: Some("train-3".into()),
            budget: 0.5,
            gated: true,
        };
        let glance = Glance { at_s: 20.0, gpus: vec![gpu], iterations: 5, solo_per_s: Some(4.0) };
        let frame = view.frame(&glance, 110);
        assert!(
            frame.contains("12:00") && frame.contains("50 %") && frame.contains("1234 ms"),
            "{frame}"
        );
        assert!(frame.lines().all(|line| line.chars().count() <= 110), "{frame}");
        let narrow = view.frame(&glance, 80);
        assert!(narrow.lines().all(|line| line.chars().count() <= 80), "{narrow}");
        assert!(narrow.contains("train-3") && narrow.contains("50 %"), "{narrow}");
        assert_eq!(cut("abc\n█░█\n", 2), "ab\n█░\n");
        assert!(view.plain(&glance).contains("p99 1234 ms"));
        assert_eq!(bar(50.0, 20).chars().filter(|c| *c == '█').count(), 10);
    }
}
