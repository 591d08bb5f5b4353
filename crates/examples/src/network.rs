//! Networks by their size: parameters, arithmetic and layers of well-known ones.

use std::ffi::c_void;
use std::fmt::Write as _;

use anyhow::bail;

use crate::driver::{Buffer, Gpu, Kernel};

/// What a network costs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Network {
    /// Its name.
    pub name: &'static str,
    /// Parameters, in thousands.
    pub kilo_parameters: u64,
    /// Multiply-adds for one image, forward, in millions.
    pub mega_macs: u64,
    /// Layers with weights.
    pub layers: u32,
}

/// Published sizes.
pub const NETWORKS: [Network; 5] = [
    Network { name: "resnet50", kilo_parameters: 25_557, mega_macs: 4_089, layers: 54 },
    Network { name: "vgg16", kilo_parameters: 138_358, mega_macs: 15_470, layers: 16 },
    Network { name: "densenet201", kilo_parameters: 20_014, mega_macs: 4_291, layers: 201 },
    Network { name: "mobilenet-v2", kilo_parameters: 3_505, mega_macs: 301, layers: 53 },
    Network { name: "inception-v3", kilo_parameters: 23_835, mega_macs: 5_713, layers: 95 },
];

/// Threads of one layer's launch.
const THREADS: u32 = 65_536;
const BLOCK: u32 = 256;
/// Multiply-adds for each weight that is loaded.
const UNROLL: u32 = 128;

impl Network {
    /// The network of a name.
    pub fn find(name: &str) -> anyhow::Result<Network> {
        match NETWORKS.iter().find(|n| n.name.eq_ignore_ascii_case(name)) {
            Some(network) => Ok(*network),
            None => {
                let known = NETWORKS.map(|n| n.name).join(", ");
                bail!("there is no network `{name}`; known are {known}")
            }
        }
    }

    /// Bytes of its parameters.
    pub fn parameter_bytes(&self) -> usize {
        usize::try_from(self.kilo_parameters * 4000).unwrap_or(usize::MAX)
    }

    /// Loop rounds of each thread of one layer, for a batch.
    fn rounds(&self, batch: u32) -> u32 {
        let macs = self.mega_macs * 1_000_000 * u64::from(batch) / u64::from(self.layers);
        let rounds = macs / u64::from(THREADS) / u64::from(UNROLL);
        u32::try_from(rounds.clamp(1, 1 << 20)).unwrap_or(1)
    }
}

/// A layer: each thread walks over weights and multiplies and adds.
pub fn layer_ptx() -> String {
    let mut body = String::new();
    for i in 0..UNROLL {
        let (to, from) = if i % 2 == 0 { ("%f2", "%f1") } else { ("%f1", "%f2") };
        writeln!(body, "    fma.rn.f32 {to}, {from}, %f3, %f4;").unwrap_or_default();
    }
    format!(
        ".version 6.4\n.target sm_70\n.address_size 64\n\
         .visible .entry layer(.param .u64 weights, .param .u64 output, .param .u32 mask, .param .u32 rounds)\n{{\n\
         .reg .pred %p<2>;\n.reg .b32 %r<10>;\n.reg .b64 %rd<8>;\n.reg .f32 %f<5>;\n\
         ld.param.u64 %rd1, [weights];\nld.param.u64 %rd2, [output];\n\
         ld.param.u32 %r1, [mask];\nld.param.u32 %r2, [rounds];\n\
         cvta.to.global.u64 %rd1, %rd1;\ncvta.to.global.u64 %rd2, %rd2;\n\
         mov.u32 %r3, %ctaid.x;\nmov.u32 %r4, %ntid.x;\nmov.u32 %r5, %tid.x;\n\
         mad.lo.u32 %r6, %r3, %r4, %r5;\nmov.u32 %r7, 0;\nmov.u32 %r8, %r6;\n\
         mov.f32 %f1, 0f3F000000;\nmov.f32 %f4, 0f3C23D70A;\n\
         $again:\n    and.b32 %r9, %r8, %r1;\n    mul.wide.u32 %rd3, %r9, 4;\n    add.u64 %rd4, %rd1, %rd3;\n\
             ld.global.f32 %f3, [%rd4];\n{body}\
             add.u32 %r8, %r8, {THREADS};\n    add.u32 %r7, %r7, 1;\n    setp.lt.u32 %p1, %r7, %r2;\n    @%p1 bra $again;\n\
         and.b32 %r9, %r6, %r1;\nmul.wide.u32 %rd5, %r9, 4;\nadd.u64 %rd6, %rd2, %rd5;\n\
         st.global.f32 [%rd6], %f1;\nret;\n}}\n"
    )
}

/// A network on a GPU.
#[derive(Debug)]
pub struct Loaded<'a> {
    /// Its sizes.
    pub network: Network,
    gpu: &'a Gpu,
    kernel: Kernel,
    /// Its parameters.
    pub weights: Buffer<'a>,
    activations: Buffer<'a>,
}

impl<'a> Loaded<'a> {
    /// Loads a network.
    pub fn new(gpu: &'a Gpu, network: Network) -> anyhow::Result<Loaded<'a>> {
        let kernel = gpu.kernel(&layer_ptx(), "layer")?;
        let weights = gpu.allocate(network.parameter_bytes())?;
        let activations = gpu.allocate(network.parameter_bytes().max(64 << 20) / 2)?;
        Ok(Loaded { network, gpu, kernel, weights, activations })
    }

    /// Puts a pass over all layers into the stream, `times` as costly as forward.
    pub fn pass(&self, batch: u32, times: u32) -> anyhow::Result<()> {
        let smaller = self.weights.bytes().min(self.activations.bytes()) / 4;
        let mut mask = u32::try_from(smaller).unwrap_or(u32::MAX).next_power_of_two() / 2 - 1;
        let mut rounds = self.network.rounds(batch) * times;
        let (mut weights, mut output) = (self.weights.address, self.activations.address);
        for _ in 0..self.network.layers {
            let mut arguments: [*mut c_void; 4] = [
                (&raw mut weights).cast(),
                (&raw mut output).cast(),
                (&raw mut mask).cast(),
                (&raw mut rounds).cast(),
            ];
            self.gpu.launch(self.kernel, THREADS / BLOCK, BLOCK, &mut arguments)?;
        }
        Ok(())
    }
}
