//! Tests of the monitor with sensors that block, fail and lie.

use super::*;
use std::sync::mpsc;
use std::time::Instant;

/// A fake sensor whose answers the test sends.
struct Fake(mpsc::Receiver<Result<GpuSample, SensorFailure>>);

impl Sensor for Fake {
    fn read(&mut self, _now: Micros) -> Result<GpuSample, SensorFailure> {
        self.0.recv().unwrap_or(Err(SensorFailure::DeviceLost))
    }

    fn source(&self) -> ActivitySource {
        ActivitySource::Dcgm
    }

    fn processes(&mut self) -> Result<Vec<u32>, SensorFailure> {
        Ok(vec![7])
    }
}

fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !holds() {
        assert!(Instant::now() < deadline, "never: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_blocked_call_is_seen_and_hurts_nobody() {
    let (send, receive) = mpsc::channel();
    let period = Duration::from_millis(1);
    let monitor = Monitor::start("t", Fake(receive), period, Duration::from_millis(5)).unwrap();
    assert!(monitor.published().sample.is_none());
    until("a call is under way", || monitor.blocked_for(now()).is_some());
    until("it shows as blocked", || {
        monitor.blocked_for(now()).is_some_and(|time| time > Micros::from_millis(20))
    });
    for at in 1..=9 {
        send.send(Ok(GpuSample::empty(Micros(at)))).unwrap();
    }
    until("all samples are in", || monitor.published().count == 9);
    assert_eq!(monitor.published().processes.unwrap().1, [7]);
    let kept: Vec<u64> =
        monitor.history(Micros(9), Micros(1000)).iter().map(|sample| sample.at.0).collect();
    assert_eq!(kept, [5, 6, 7, 8, 9], "the ring keeps its length");
    send.send(Err(SensorFailure::Call("no".into()))).unwrap();
    until("the failure is told", || monitor.published().failure.is_some());
    assert_eq!(monitor.published().sample.unwrap().at, Micros(9), "the last good one stays");
    send.send(Ok(GpuSample::empty(Micros(10)))).unwrap();
    until("it recovers", || monitor.published().failure.is_none());
    drop(send);
    until("the device is lost", || {
        monitor.published().failure.is_some_and(|(_, why)| why == SensorFailure::DeviceLost)
    });
}
