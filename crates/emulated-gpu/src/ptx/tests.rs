//! Single instructions through the whole way: read, lowered, run.

use super::{Grid, Memory, Outcome, load, run};

/// Memory that is one array of words.
struct Words(Vec<u32>);

impl Memory for Words {
    fn range(&self, address: u64) -> Option<(u64, u64)> {
        let start = self.0.as_ptr() as u64;
        let end = start + (self.0.len() * 4) as u64;
        (start..end).contains(&address).then_some((start, end))
    }
}

/// A kernel that finds its operands in `%a`, `%b`, `%c` and leaves its result in `%d`.
fn text(body: &str) -> String {
    format!(
        ".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry k(.param .u64 p)\n{{\n\
         .reg .b64 %p; .reg .b32 %a, %b, %c, %d; .reg .b16 %h<4>; .reg .f64 %w; .reg .pred %q; \n\
         .shared .align 4 .b8 tile[128]; .reg .b32 %t<8>;\n\
         ld.param.u64 %p, [p]; ld.global.u32 %a, [%p]; ld.global.u32 %b, [%p+4]; ld.global.u32 %c, [%p+8];\n\
         {body}\n st.global.u32 [%p+12], %d; ret;\n}}\n"
    )
}

/// The result for three operands, or why it is not computed.
fn result_of(body: &str, operands: [u32; 3]) -> Result<u32, String> {
    let module = load(&text(body)).expect("it can be read");
    let kernel = &module.kernels[0];
    if let Some(reason) = &kernel.unknown {
        return Err(reason.clone());
    }
    let mut words = Words(operands.into_iter().chain([0xdead_beef]).collect());
    let params = (words.0.as_mut_ptr() as u64).to_ne_bytes();
    let grid = Grid { blocks: [1; 3], threads: [1; 3], shared_bytes: 0 };
    assert_eq!(run(kernel, &grid, &params, &words, 1000), Outcome::Done, "{body}");
    Ok(words.0[3])
}

#[test]
fn types_and_words_that_are_not_known_are_refused_and_not_passed_over() {
    for body in [
        "add.f16x2 %d, %a, %b;",
        "fma.rn.f16x2 %d, %a, %b, %c;",
        "mul.bf16x2 %d, %a, %b;",
        "add.rn.bf16 %h1, %h2, %h3;",
        "add.sat.f32 %d, %a, %b;",
        "fma.rn.sat.f32 %d, %a, %b, %c;",
        "add.sat.s32 %d, %a, %b;",
        "add.cc.u32 %d, %a, %b;",
        "add.rz.f32 %d, %a, %b;",
        "mul.rm.f32 %d, %a, %b;",
        "fma.rp.f32 %d, %a, %b, %c;",
        "cvt.rz.f32.f64 %d, %w;",
        "cvt.rn.bf16x2.f32 %d, %a, %b;",
        "cvt.rn.relu.f16.f32 %h1, %a;",
        "mul24.hi.u32 %d, %a, %b;",
        "mul24.lo.u32 %d, %a, %b;",
        "mad.hi.sat.s32 %d, %a, %b, %c;",
        "min.NaN.f32 %d, %a, %b;",
        "max.xorsign.abs.f32 %d, %a, %b;",
        "set.lt.and.u32.f32 %d, %a, %b, %q;",
        "prmt.b32.f4e %d, %a, %b, %c;",
        "lop3.or.b32 %d|%q, %a, %b, %c, 0x80, %q;",
        "ld.shared::cluster.u32 %d, [%a];",
        "red.global.add.noftz.f16x2 [%p], %a;",
        "bar.sync 1, 64;",
        "bar.arrive 1, 64;",
        "neg.b128 %d, %a;",
    ] {
        let outcome = result_of(body, [1, 2, 3]);
        let reason = outcome.expect_err(body);
        assert!(reason.contains(body.split(' ').next().unwrap_or(body)), "{body}: {reason}");
    }
}

#[test]
fn words_that_are_known_do_what_they_say() {
    let f = f32::to_bits;
    let subnormal = f(1e-40);
    for (body, operands, wanted) in [
        ("set.lt.f32.f32 %d, %a, %b;", [f(1.0), f(2.0), 0], f(1.0)),
        ("set.lt.f32.s32 %d, %a, %b;", [3, 2, 0], 0),
        ("set.lt.u32.f32 %d, %a, %b;", [f(1.0), f(2.0), 0], u32::MAX),
        ("set.geu.s32.f32 %d, %a, %b;", [f(f32::NAN), f(2.0), 0], u32::MAX),
        ("add.rn.f32 %d, %a, %b;", [f(1.5), f(2.25), 0], f(3.75)),
        ("add.f32 %d, %a, %b;", [subnormal, subnormal, 0], 2 * subnormal),
        ("add.ftz.f32 %d, %a, %b;", [subnormal, f(1.0), 0], f(1.0)),
        ("mul.ftz.f32 %d, %a, %b;", [f(-1e-20), f(1e-20), 0], f(-0.0)),
        ("cvt.sat.f32.f32 %d, %a;", [f(3.0), 0, 0], f(1.0)),
        ("cvt.sat.f32.f32 %d, %a;", [f(f32::NAN), 0, 0], 0),
        ("cvt.rzi.s32.f32 %d, %a;", [f(-3.7), 0, 0], (-3_i32).cast_unsigned()),
        ("cvt.rpi.f32.f32 %d, %a;", [f(3.2), 0, 0], f(4.0)),
        ("ld.global.nc.L1::no_allocate.u32 %d, [%p+4];", [1, 77, 3], 77),
        ("setp.lt.ftz.f32 %q, %a, %b; selp.u32 %d, 1, 2, %q;", [f(-1e-40), f(0.0), 0], 2),
        ("shf.l.wrap.b32 %d, %a, %b, %c;", [0x8000_0000, 1, 1], 3),
    ] {
        assert_eq!(result_of(body, operands), Ok(wanted), "{body} of {operands:x?}");
    }
    // Half-way between two halves but for a bit that single precision does not hold.
    let body = "mov.f64 %w, 0d3FF0020000000001; cvt.rn.f16.f64 %h1, %w; cvt.u32.u16 %d, %h1;";
    assert_eq!(result_of(body, [0; 3]), Ok(0x3c01));
}

/// Sums the lanes of a warp in shared memory, as `__syncwarp` between the steps makes right.
#[test]
fn a_warp_waits_for_its_lanes() {
    let step = |n: u32| {
        format!(
            // Lanes beyond the tile read somewhere in it: only the lower ones store.
            "add.u32 %t2, %t1, {}; and.b32 %t2, %t2, 127; ld.shared.u32 %t3, [%t2]; ld.shared.u32 %t4, [%t1]; bar.warp.sync 0xffffffff;\n\
             add.u32 %t4, %t4, %t3; setp.lt.u32 %q, %t0, {n}; @%q st.shared.u32 [%t1], %t4; bar.warp.sync 0xffffffff;\n",
            4 * n
        )
    };
    // Each half of the warp comes by a way of its own to the same meeting.
    let fork = "setp.lt.u32 %q, %t0, 16; @%q bra $low; bar.warp.sync 0xffffffff; bra $both;\n\
                $low: nanosleep.u32 10; bar.warp.sync 0xffffffff;\n$both:\n";
    let steps: String = [16, 8, 4, 2, 1].map(step).concat();
    let body = format!(
        "mov.u32 %t0, %laneid; shl.b32 %t1, %t0, 2; mov.u32 %t5, tile; add.u32 %t1, %t1, %t5;\n\
         mul.lo.u32 %t6, %t0, %t0; st.shared.u32 [%t1], %t6;\n{fork}{steps}\n\
         ld.shared.u32 %d, [tile]; "
    );
    let module = load(&text(&body)).expect("it can be read");
    assert_eq!(module.kernels[0].unknown, None);
    let mut words = Words(vec![0; 4]);
    let params = (words.0.as_mut_ptr() as u64).to_ne_bytes();
    let grid = Grid { blocks: [1; 3], threads: [32, 1, 1], shared_bytes: 0 };
    assert_eq!(run(&module.kernels[0], &grid, &params, &words, 1_000_000), Outcome::Done);
    assert_eq!(words.0[3], (0..32).map(|lane| lane * lane).sum::<u32>());
}
