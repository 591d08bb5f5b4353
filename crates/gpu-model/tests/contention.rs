//! What must hold of the contention function whatever the kernels are.

use muxflow_gpu_model::{ClientId, GpuProfile, Resident, contend};
use proptest::prelude::*;

fn kernel(client: u32) -> impl Strategy<Value = Resident> {
    let part = || 0.0f64..=1.0;
    (1.0f64..200.0, 1.0f64..=40.0, 0.05f64..=1.0, part(), part(), 0.0f64..5000.0).prop_map(
        move |(sm_fill, sm_cap, occupancy, issue, bandwidth, kernel_us)| Resident {
            client: ClientId(client),
            sm_cap,
            sm_fill,
            occupancy,
            issue,
            bandwidth,
            kernel_us,
        },
    )
}

fn kernels() -> impl Strategy<Value = Vec<Resident>> {
    (0u32..6).prop_flat_map(|n| (0..n).map(|i| kernel(i / 2)).collect::<Vec<_>>())
}

fn rates(profile: &GpuProfile, residents: &[Resident]) -> Vec<f64> {
    let mut out = vec![0.0; residents.len()];
    contend(profile, residents, &mut out);
    out
}

proptest! {
    #[test]
    fn rates_and_counters_stay_in_range(set in kernels()) {
        let t4 = GpuProfile::built_in("T4").unwrap();
        let mut out = vec![0.0; set.len()];
        let load = contend(&t4, &set, &mut out);
        for r in &out {
            prop_assert!(*r > 0.0 && *r <= 1.0, "{r}");
        }
        for x in [load.sm_activity, load.sm_occupancy, load.dram_activity, load.intensity] {
            prop_assert!((0.0..=1.0).contains(&x), "{load:?}");
        }
        prop_assert_eq!(load.busy, !set.is_empty());
    }

    // With three or more it can: a neighbour that slows a bandwidth hog helps the third.
    #[test]
    fn a_neighbour_never_helps_one_that_was_alone(k in kernel(0), extra in kernel(9)) {
        let t4 = GpuProfile::built_in("T4").unwrap();
        let before = rates(&t4, &[k])[0];
        let after = rates(&t4, &[k, extra])[0];
        prop_assert!(after <= before + 1e-12, "{before} -> {after}");
    }

    #[test]
    fn a_larger_cap_never_slows_a_kernel_that_is_alone(k in kernel(0), more in 0.0f64..40.0) {
        let t4 = GpuProfile::built_in("T4").unwrap();
        let small = rates(&t4, &[k])[0];
        let large = rates(&t4, &[Resident { sm_cap: (k.sm_cap + more).min(40.0), ..k }])[0];
        prop_assert!(large >= small - 1e-12, "{small} {large}");
    }

    #[test]
    fn a_kernel_alone_and_uncapped_runs_at_full_speed(k in kernel(0)) {
        let t4 = GpuProfile::built_in("T4").unwrap();
        // A kernel on few SMs cannot claim more bandwidth than they reach.
        let reach = (k.sm_fill.min(40.0) / 40.0 / t4.contention.bandwidth_saturation_share).min(1.0);
        let k = Resident { sm_cap: 40.0, bandwidth: k.bandwidth * reach, ..k };
        let r = rates(&t4, &[k])[0];
        prop_assert!((r - 1.0).abs() < 1e-9, "{r}");
    }
}

fn named(client: u32, sm_fill: f64, sm_cap: f64, kernel_us: f64) -> Resident {
    let id = ClientId(client);
    Resident { client: id, sm_cap, sm_fill, occupancy: 0.3, issue: 0.4, bandwidth: 0.1, kernel_us }
}

#[test]
fn short_kernels_wait_for_long_blocks_only_where_no_sm_is_free() {
    let t4 = GpuProfile::built_in("T4").unwrap();
    let speed = |cap: f64, job_us: f64| {
        rates(&t4, &[named(0, 10.0, 40.0, 30.0), named(1, 40.0, cap, job_us)])[0]
    };
    // Thirty SMs for the job leave the service its ten: long blocks disturb no more than short.
    assert_eq!(speed(30.0, 1800.0), speed(30.0, 30.0));
    assert!(speed(40.0, 1800.0) < 0.3 * speed(30.0, 1800.0), "{}", speed(40.0, 1800.0));
    assert!(speed(35.0, 1800.0) > 1.2 * speed(40.0, 1800.0));
    // A job whose kernels go in many waves has short blocks.
    let waves = rates(&t4, &[named(0, 10.0, 40.0, 30.0), named(1, 4000.0, 40.0, 1800.0)])[0];
    assert!(waves > 0.7 * speed(30.0, 30.0), "{waves}");
    // Whose length is not known neither waits nor is waited for.
    assert!(speed(40.0, 0.0) > 0.7 * speed(30.0, 30.0));
    // The job hardly notices the service's short blocks.
    let job = |us: f64| rates(&t4, &[named(0, 10.0, 40.0, us), named(1, 40.0, 40.0, 1800.0)])[1];
    assert!((job(30.0) / job(0.0) - 1.0).abs() < 0.01);
}
