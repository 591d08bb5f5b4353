//! cudarc under the interposer: it opens the driver itself and looks every function up by `dlsym`.
//! `fit QUOTA`, `over BYTES` or `loop 0`, as the Python clients.

#![expect(clippy::print_stdout, reason = "a program whose output is its result")]

use std::io::Write;

use cudarc::driver::{CudaContext, LaunchConfig, PushKernelArg, sys};
use cudarc::nvrtc::Ptx;

const ADD: &str = ".version 7.0
.target sm_70
.address_size 64
.visible .entry add(.param .u64 out, .param .u64 in, .param .u32 n)
{
.reg .pred %p<2>;
.reg .f32 %f<3>;
.reg .b32 %r<6>;
.reg .b64 %rd<7>;
ld.param.u64 %rd1, [out];
ld.param.u64 %rd2, [in];
ld.param.u32 %r1, [n];
mov.u32 %r2, %ctaid.x;
mov.u32 %r3, %ntid.x;
mov.u32 %r4, %tid.x;
mad.lo.s32 %r5, %r2, %r3, %r4;
setp.ge.u32 %p1, %r5, %r1;
@%p1 bra DONE;
mul.wide.u32 %rd3, %r5, 4;
add.s64 %rd4, %rd1, %rd3;
add.s64 %rd5, %rd2, %rd3;
ld.global.f32 %f1, [%rd5];
add.f32 %f2, %f1, %f1;
st.global.f32 [%rd4], %f2;
DONE:
ret;
}
";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let words: Vec<String> = std::env::args().collect();
    let number: usize = words.get(2).ok_or("two arguments")?.parse()?;
    let context = CudaContext::new(0)?;
    let stream = context.default_stream();
    match words[1].as_str() {
        "fit" => {
            let data: Vec<f32> = (0_u16..1024).map(f32::from).collect();
            let input = stream.clone_htod(&data)?;
            let mut output = stream.alloc_zeros::<f32>(data.len())?;
            let add = context.load_module(Ptx::from_src(ADD))?.load_function("add")?;
            let count = 1024_u32;
            let mut launch = stream.launch_builder(&add);
            launch.arg(&mut output).arg(&input).arg(&count);
            // SAFETY: the kernel takes two arrays of so many floats.
            unsafe { launch.launch(LaunchConfig::for_num_elems(count)) }?;
            let doubled: Vec<f32> = data.iter().map(|value| value + value).collect();
            assert_eq!(stream.clone_dtoh(&output)?, doubled);
            let (free, total) = context.mem_get_info()?;
            assert!(total == number && free < total, "{free} of {total}");
            println!("ok");
        }
        "over" => match stream.alloc_zeros::<u8>(number) {
            Err(refused) if refused.0 == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                println!("refused 2");
            }
            other => println!("{other:?}"),
        },
        _ => {
            let input = stream.alloc_zeros::<f32>(1024)?;
            let mut output = stream.alloc_zeros::<f32>(1024)?;
            let add = context.load_module(Ptx::from_src(ADD))?.load_function("add")?;
            println!("looping");
            std::io::stdout().flush()?;
            loop {
                let mut launch = stream.launch_builder(&add);
                launch.arg(&mut output).arg(&input).arg(&1024_u32);
                // SAFETY: as above.
                unsafe { launch.launch(LaunchConfig::for_num_elems(1024)) }?;
            }
        }
    }
    Ok(())
}
