//! Code images: PTX text that is interpreted, machine code that is only timed.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};

use muxflow_abi::cuda::result::{
    CUDA_ERROR_INVALID_IMAGE, CUDA_ERROR_INVALID_PTX, CUDA_ERROR_INVALID_VALUE,
    CUDA_ERROR_NOT_FOUND,
};
use muxflow_emulated_gpu::cost::{self, Cost};
use muxflow_emulated_gpu::facts::Facts;
use muxflow_emulated_gpu::ptx::{self, Grid, Outcome};

use crate::context::{self, Context, lock};
use crate::ffi::{self, Answer, Handle, Kind, regardless};
use crate::image::{self, Image};
use crate::memory::{self, Everything, Nature};
use crate::native;

/// Instructions that a launch may take when it is really computed.
fn compute_limit() -> u64 {
    static LIMIT: OnceLock<u64> = OnceLock::new();
    *LIMIT.get_or_init(|| {
        let text = std::env::var("MUXFLOW_EMULATED_COMPUTE_LIMIT").ok();
        text.and_then(|t| t.parse().ok()).unwrap_or(8_000_000)
    })
}

/// A loaded image.
#[derive(Debug)]
pub(crate) struct Module {
    functions: RwLock<BTreeMap<String, Handle<Function>>>,
    variables: BTreeMap<String, (u64, u64)>,
    code: Option<Arc<ptx::Module>>,
    machine: BTreeMap<String, image::MachineKernel>,
    /// Names cannot be known: every name is a kernel.
    opaque: bool,
}

impl Kind for Module {
    const MAGIC: u64 = 0x0c0d_a003_0d01_0003;
}

/// A kernel of a module.
#[derive(Debug)]
pub(crate) struct Function {
    pub name: String,
    pub c_name: CString,
    pub module: OnceLock<Handle<Module>>,
    code: Option<(Arc<ptx::Module>, usize)>,
    native: Option<native::Native>,
    /// Its name says what it costs.
    hinted: bool,
    machine: image::MachineKernel,
    /// Offset and size of each parameter.
    pub params: Vec<(usize, usize)>,
    pub param_bytes: usize,
    pub static_shared_bytes: usize,
    pub max_threads: u32,
    pub max_dynamic_shared: AtomicI32,
    pub carveout: AtomicI32,
    /// Old interface: block shape and shared size set before the launch.
    pub block_shape: Mutex<([u32; 3], u32)>,
    pub param_buffer: Mutex<Vec<u8>>,
    costs: Mutex<BTreeMap<u64, (Cost, bool)>>,
    told: AtomicU32,
}

impl Kind for Function {
    const MAGIC: u64 = 0x0c0d_a004_f00c_0004;
}

/// Loads an image into a context.
pub(crate) fn load(context: &'static Context, bytes: image::Source) -> Answer<Handle<Module>> {
    let module = match image::read(bytes).ok_or(CUDA_ERROR_INVALID_IMAGE)? {
        Image::Ptx(text) => from_ptx(context, &text)?,
        Image::Machine(kernels, variables) => {
            let mut placed = BTreeMap::new();
            for (name, bytes) in variables {
                let address = memory::allocate(context, bytes.max(1), Nature::Module, 0)?;
                placed.insert(name, (address, bytes));
            }
            Module {
                functions: RwLock::new(BTreeMap::new()),
                variables: placed,
                code: None,
                machine: kernels.into_iter().collect(),
                opaque: false,
            }
        }
        Image::Opaque => Module {
            functions: RwLock::new(BTreeMap::new()),
            variables: BTreeMap::new(),
            code: None,
            machine: BTreeMap::new(),
            opaque: true,
        },
    };
    Ok(Handle::new(module))
}

fn from_ptx(context: &'static Context, text: &str) -> Answer<Module> {
    let mut code = ptx::load(text).map_err(|reason| {
        ffi::log(&format!("PTX refused: {reason}"));
        CUDA_ERROR_INVALID_PTX
    })?;
    let mut placed = Vec::new();
    let mut variables = BTreeMap::new();
    for variable in &code.variables {
        let bytes = variable.bytes.max(1);
        let address = memory::allocate(context, bytes as u64, Nature::Module, 0)?;
        // SAFETY: just allocated, at least that long, and host-backed.
        unsafe {
            (address as *mut u8).write_bytes(0, bytes);
            std::ptr::copy_nonoverlapping(
                variable.init.as_ptr(),
                address as *mut u8,
                variable.init.len().min(bytes),
            );
        }
        placed.push(address);
        variables.insert(variable.name.clone(), (address, bytes as u64));
    }
    code.place(&placed);
    Ok(Module {
        functions: RwLock::new(BTreeMap::new()),
        variables,
        code: Some(Arc::new(code)),
        machine: BTreeMap::new(),
        opaque: false,
    })
}

impl Module {
    /// The kernel of a name.
    pub(crate) fn function(&self, own: Handle<Module>, name: &str) -> Answer<Handle<Function>> {
        let known =
            self.functions.read().unwrap_or_else(PoisonError::into_inner).get(name).copied();
        if let Some(handle) = known {
            return Ok(handle);
        }
        let function = self.make(name).ok_or(CUDA_ERROR_NOT_FOUND)?;
        regardless(function.module.set(own));
        let mut functions = self.functions.write().unwrap_or_else(PoisonError::into_inner);
        Ok(*functions.entry(name.to_owned()).or_insert_with(|| Handle::new(function)))
    }

    /// Names of all kernels.
    pub(crate) fn names(&self) -> Vec<String> {
        let ptx = self.code.iter().flat_map(|c| c.kernels.iter().map(|k| k.name.clone()));
        ptx.chain(self.machine.keys().cloned()).collect()
    }

    /// Address and size of a variable.
    pub(crate) fn variable(&self, name: &str) -> Answer<(u64, u64)> {
        self.variables.get(name).copied().ok_or(CUDA_ERROR_NOT_FOUND)
    }

    /// Gives the memory of its variables back and ends its kernels.
    pub(crate) fn unload(&self) {
        for (address, _) in self.variables.values() {
            regardless(memory::free(*address));
        }
        let mut functions = self.functions.write().unwrap_or_else(PoisonError::into_inner);
        for (_, handle) in std::mem::take(&mut *functions) {
            regardless(handle.destroy());
        }
    }

    fn make(&self, name: &str) -> Option<Function> {
        let mut function = Function {
            name: name.to_owned(),
            c_name: CString::new(name).ok()?,
            module: OnceLock::new(),
            code: None,
            native: native::find(name),
            hinted: name.contains("_muxflow_us"),
            machine: image::MachineKernel::default(),
            params: Vec::new(),
            param_bytes: 0,
            static_shared_bytes: 0,
            max_threads: 1024,
            max_dynamic_shared: AtomicI32::new(48 << 10),
            carveout: AtomicI32::new(-1),
            block_shape: Mutex::new(([1; 3], 0)),
            param_buffer: Mutex::new(Vec::new()),
            costs: Mutex::new(BTreeMap::new()),
            told: AtomicU32::new(0),
        };
        if let Some(code) = &self.code {
            let at = code.kernels.iter().position(|k| k.name == name)?;
            let kernel = &code.kernels[at];
            function.params.clone_from(&kernel.params);
            function.param_bytes = kernel.param_bytes;
            function.static_shared_bytes = kernel.shared_bytes;
            if kernel.max_threads > 0 {
                function.max_threads = kernel.max_threads;
            }
            function.code = Some((Arc::clone(code), at));
            return Some(function);
        }
        if let Some(kernel) = self.machine.get(name) {
            function.params.clone_from(&kernel.params);
            function.param_bytes = kernel.params.iter().map(|(o, s)| o + s).max().unwrap_or(0);
            function.machine = kernel.clone();
            return Some(function);
        }
        self.opaque.then_some(function)
    }
}

impl Function {
    fn kernel(&self) -> Option<&ptx::Kernel> {
        let (code, at) = self.code.as_ref()?;
        code.kernels.get(*at).filter(|k| k.unknown.is_none())
    }

    /// Whether the parameters matter: to compute, or to learn the cost. A kernel whose name says
    /// its cost is taken at its word and only timed.
    pub(crate) fn reads_params(&self) -> bool {
        !self.hinted && (self.native.is_some() || self.kernel().is_some())
    }

    /// What a launch costs, and whether it is to be computed.
    pub(crate) fn cost(&self, facts: &Facts, grid: &Grid, params: &[u8]) -> (Cost, bool) {
        let mut hasher = DefaultHasher::new();
        (grid.blocks, grid.threads, grid.shared_bytes).hash(&mut hasher);
        if self.reads_params() {
            for (offset, size) in &self.params {
                let Some(bytes) = params.get(*offset..offset + size) else { continue };
                // Where a pointer points to does not change the cost.
                let pointer = bytes.try_into().map(u64::from_le_bytes).unwrap_or(0);
                if *size != 8 || pointer < 1 << 20 || memory::look(pointer, |_| ()).is_none() {
                    bytes.hash(&mut hasher);
                }
            }
        }
        let key = hasher.finish();
        if let Some(known) = lock(&self.costs).get(&key) {
            return *known;
        }
        let answer = self.find_cost(facts, grid, params);
        let mut costs = lock(&self.costs);
        if costs.len() > 4096 {
            costs.clear();
        }
        costs.insert(key, answer);
        answer
    }

    fn find_cost(&self, facts: &Facts, grid: &Grid, params: &[u8]) -> (Cost, bool) {
        let threads = grid.block_threads();
        let blocks = grid.block_count() as f64;
        let all = blocks * f64::from(threads);
        if let Some(cost) = cost::hint(&self.name, facts) {
            self.tell_timed(|| "its name says what it costs".to_owned());
            return (cost, false);
        }
        let sample = match (self.kernel(), &self.code) {
            (Some(kernel), _) => ptx::probe(kernel, grid, params, &Everything),
            (None, Some((code, at))) => {
                let kernel = &code.kernels[*at];
                static_sample(kernel.static_instructions, kernel.static_accesses)
            }
            (None, None) => {
                static_sample(self.machine.instructions * 4, self.machine.instructions / 2)
            }
        };
        let launch = cost::Launch {
            blocks,
            threads,
            shared_bytes: self.static_shared_bytes as u64 + u64::from(grid.shared_bytes),
            instructions: sample.instructions,
            bytes: sample.global_bytes,
        };
        let cost = cost::cost(facts, &launch);
        let fits = all * sample.instructions.max(1.0) <= compute_limit() as f64;
        let computes = fits && self.reads_params();
        if !computes {
            self.tell_timed(|| match (&self.code, self.kernel()) {
                (None, _) => "machine code".to_owned(),
                (Some((code, at)), None) => code.kernels[*at].unknown.clone().unwrap_or_default(),
                _ => format!("{all} threads of {} instructions", sample.instructions),
            });
        }
        (cost, computes)
    }

    /// Says once, to who asked for a log, that the kernel takes time and does nothing else.
    fn tell_timed(&self, why: impl FnOnce() -> String) {
        if self.told.fetch_add(1, Ordering::Relaxed) == 0 && ffi::logging() {
            ffi::log(&format!("kernel {} is timed only: {}", self.name, why()));
        }
    }

    /// Runs it for real.
    pub(crate) fn compute(&self, grid: &Grid, params: &[u8], memory: &Everything) -> Outcome {
        if let Some(native) = self.native
            && self.kernel().is_none()
        {
            return native::run(native, grid, params);
        }
        match self.kernel() {
            Some(kernel) => ptx::run(kernel, grid, params, memory, compute_limit() * 20),
            None => Outcome::Done,
        }
    }
}

fn static_sample(instructions: usize, accesses: usize) -> ptx::Sample {
    ptx::Sample {
        instructions: instructions.max(16) as f64,
        global_bytes: accesses.max(2) as f64 * 4.0,
    }
}

/// The function of a handle in the current context.
pub(crate) fn in_current(module: Handle<Module>, name: &str) -> Answer<Handle<Function>> {
    context::current()?;
    if name.is_empty() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    module.get()?.function(module, name)
}
