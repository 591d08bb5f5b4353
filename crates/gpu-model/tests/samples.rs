//! The samples that predictors train on.

use muxflow_gpu_model::{GpuProfile, samples};

#[test]
fn samples_repeat_by_seed_and_span_the_range() {
    let t4 = GpuProfile::built_in("T4").unwrap();
    let a = samples(&t4, 2000, 11).unwrap();
    assert_eq!(a, samples(&t4, 2000, 11).unwrap());
    assert_ne!(a, samples(&t4, 2000, 12).unwrap());
    assert_eq!(a.len(), 2000);
    let mut speeds: Vec<f64> = a.iter().map(|s| s.offline_speed_true).collect();
    speeds.sort_by(f64::total_cmp);
    assert!(speeds[100] < 0.25 && speeds[1900] > 0.75, "{} {}", speeds[100], speeds[1900]);
    for s in &a {
        assert!((0.0..=1.0).contains(&s.offline_speed), "{s:?}");
        assert!(s.online_slowdown >= 1.0 && s.online_slowdown < 30.0, "{s:?}");
        assert!(s.online.gpu_util.is_some() && s.offline.solo_time.is_some());
    }
    let noise: f64 =
        a.iter().map(|s| (s.offline_speed - s.offline_speed_true).abs()).sum::<f64>() / 2000.0;
    assert!(noise > 0.0 && noise < 0.02, "{noise}");
}
