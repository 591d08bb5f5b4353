//! The emulator's way (kernel by kernel) and the simulator's way (closed form) must tell the same
//! story of the same pair.

use muxflow_gpu_model::{
    ClientId, Device, GpuProfile, Pair, Placed, Resident, Rng, Sharing, WorkloadShape, pair,
};

struct Running {
    kernel: Resident,
    left_us: f64,
    started_us: f64,
    kernels_left: u32,
}

struct Stepped {
    offline_per_s: f64,
    online_busy_us: f64,
    mean_clock_mhz: f64,
    mean_sm_activity: f64,
}

/// Steps a service with Poisson requests and a job that runs flat out for `seconds`.
fn step(
    profile: &GpuProfile,
    sharing: Sharing,
    online: Option<(&Placed, f64)>,
    offline: Option<(&Placed, f64)>,
    seconds: f64,
) -> Stepped {
    let mut device = Device::new(profile.clone(), sharing);
    let mut rng = Rng::new(42);
    let end = seconds * 1e6;
    let mut now = 0.0;
    let mut arrivals = online.map_or(f64::INFINITY, |(_, rate)| rng.exponential(1e6 / rate));
    let mut queue: std::collections::VecDeque<f64> = std::collections::VecDeque::new();
    let (mut on, mut off): (Option<Running>, Option<Running>) = (None, None);
    let mut off_wakes = 0.0;
    let (mut iterations, mut served, mut busy, mut clock, mut activity) = (0.0, 0.0, 0.0, 0.0, 0.0);
    while now < end {
        if let Some((p, rate)) = online {
            while arrivals <= now {
                queue.push_back(arrivals);
                arrivals += rng.exponential(1e6 / rate);
            }
            if on.is_none() && queue.pop_front().is_some() {
                on = Some(start(p, 0, f64::from(profile.sms), now));
            }
        }
        if let Some((p, cap)) = offline
            && off.is_none()
            && off_wakes <= now
        {
            off = Some(start(p, 1, cap, now));
        }
        let residents: Vec<Resident> = on.iter().chain(off.iter()).map(|r| r.kernel).collect();
        let eval = device.evaluate(&residents);
        let mut dt = eval.next_change_us.min(end - now).min((arrivals - now).max(1e-3));
        if offline.is_some() && off.is_none() {
            dt = dt.min((off_wakes - now).max(1e-3));
        }
        for (r, rate) in on.iter().chain(off.iter()).zip(&eval.rates) {
            if *rate > 0.0 {
                dt = dt.min(r.left_us / rate);
            }
        }
        let dt = dt.max(1e-6);
        device.advance(&residents, &eval, dt);
        now += dt;
        clock += eval.sm_clock_mhz * dt;
        activity += eval.load.sm_activity * dt;
        for (r, rate) in on.iter_mut().chain(off.iter_mut()).zip(&eval.rates) {
            r.left_us -= rate * dt;
        }
        if let Some((p, _)) = online
            && finished(&mut on, p)
            && let Some(r) = on.take()
        {
            served += 1.0;
            busy += now - r.started_us;
        }
        if let Some((p, _)) = offline
            && finished(&mut off, p)
        {
            off = None;
            iterations += 1.0;
            off_wakes = now + p.host_gap_us;
        }
    }
    Stepped {
        offline_per_s: iterations / seconds,
        online_busy_us: if served > 0.0 { busy / served } else { 0.0 },
        mean_clock_mhz: clock / end,
        mean_sm_activity: activity / end,
    }
}

fn start(p: &Placed, client: u32, cap: f64, now: f64) -> Running {
    Running {
        kernel: Resident { client: ClientId(client), sm_cap: cap, ..p.kernel },
        left_us: p.busy_us / f64::from(p.kernels),
        started_us: now,
        kernels_left: p.kernels,
    }
}

/// Moves on to the next kernel; true when the iteration is done.
fn finished(r: &mut Option<Running>, p: &Placed) -> bool {
    let Some(run) = r else { return false };
    if run.left_us > 1e-9 {
        return false;
    }
    run.kernels_left -= 1;
    run.left_us = p.busy_us / f64::from(p.kernels);
    run.kernels_left == 0
}

#[test]
fn stepping_and_averaging_agree_under_every_sharing_mode() {
    let mut worst: f64 = 0.0;
    for gpu in ["T4", "A10"] {
        let profile = GpuProfile::built_in(gpu).unwrap();
        let modes = [
            Sharing::Mps,
            Sharing::TimeSlice,
            Sharing::PriorityTimeSlice { favoured: vec![ClientId(0)], weight: 4.0 },
        ];
        let pairs = [
            ("densenet201-infer", "vgg16-train", 20.0, 0.7),
            ("resnet50-infer", "densenet201-train", 60.0, 0.4),
            ("recommend-infer", "inceptionv3-train", 90.0, 0.9),
        ];
        for sharing in modes {
            for (service, job, rate, share) in pairs {
                let online = WorkloadShape::built_in(service).unwrap().on(&profile);
                let offline = WorkloadShape::built_in(job).unwrap().on(&profile);
                let cap = share * f64::from(profile.sms);
                let said = pair(
                    &profile,
                    &sharing,
                    &Pair {
                        online: Some(&online),
                        batches_per_s: rate,
                        offline: Some(&offline),
                        share,
                        gate: 1.0,
                    },
                );
                let seen = step(
                    &profile,
                    sharing.clone(),
                    Some((&online, rate)),
                    Some((&offline, cap)),
                    30.0,
                );
                let alone = step(&profile, Sharing::Mps, None, Some((&offline, 1e9)), 30.0);
                let speed = seen.offline_per_s / alone.offline_per_s;
                let clock = said.gpu.clock_ratio * f64::from(profile.power.max_mhz);
                let what = format!(
                    "{gpu} {service}+{job} {sharing:?}: speed {speed:.3} said {:.3}; online busy {:.0} said {:.0}; clock {:.0} said {clock:.0}; SM {:.3} said {:.3}",
                    said.offline_speed,
                    seen.online_busy_us,
                    said.online_busy_us,
                    seen.mean_clock_mhz,
                    seen.mean_sm_activity,
                    said.gpu.load.sm_activity,
                );
                println!("{what}");
                assert!((speed - said.offline_speed).abs() < 0.05, "{what}");
                // Averaging leaves out the wait for the rest of the slice that a request meets.
                let slack_us = if sharing == Sharing::Mps { 0.0 } else { 1000.0 };
                let off_us = (seen.online_busy_us - said.online_busy_us).abs();
                assert!(off_us < 0.05 * said.online_busy_us + slack_us, "{what}");
                assert!((seen.mean_clock_mhz / clock - 1.0).abs() < 0.05, "{what}");
                assert!((seen.mean_sm_activity - said.gpu.load.sm_activity).abs() < 0.05, "{what}");
                worst = worst.max((speed - said.offline_speed).abs());
            }
        }
    }
    println!("largest difference in offline speed: {worst:.3}");
}

#[test]
fn the_gate_slows_the_job_and_frees_the_service() {
    let t4 = GpuProfile::built_in("T4").unwrap();
    let online = WorkloadShape::built_in("bert-base-infer").unwrap().on(&t4);
    let offline = WorkloadShape::built_in("resnet50-train").unwrap().on(&t4);
    let at = |gate: f64| {
        pair(
            &t4,
            &Sharing::Mps,
            &Pair {
                online: Some(&online),
                batches_per_s: 25.0,
                offline: Some(&offline),
                share: 1.0,
                gate,
            },
        )
    };
    let (open, half, shut) = (at(1.0), at(0.5), at(0.0));
    assert!(open.offline_speed > half.offline_speed && half.offline_speed > 0.2);
    assert!(open.online_slowdown() > half.online_slowdown());
    assert_eq!(shut.offline_speed, 0.0);
    assert!((shut.online_slowdown() - 1.0).abs() < 1e-9);
}

#[test]
fn a_new_gpu_type_is_a_file() {
    let text = include_str!("../profiles/t4.toml")
        .replace("name = \"T4\"", "name = \"T4-half\"")
        .replace("sms = 40", "sms = 20");
    let half = GpuProfile::from_toml(&text).unwrap();
    let t4 = GpuProfile::built_in("T4").unwrap();
    let job = WorkloadShape::built_in("vgg16-train").unwrap();
    // Same total compute on half the SMs: a job that fills the GPU is not slower by more than the
    // SMs it can no longer fill.
    assert!(job.on(&half).busy_us <= job.on(&t4).busy_us * 1.01);
    let record = job.profile_record(&half, 0.0);
    assert_eq!(record.gpu_type.as_str(), "T4-half");
    assert!(record.sm_activity.unwrap().value() > 80.0);
}
