//! The shape of a handler: a C function with the real one at hand.

use core::ffi::c_void;

/// A handler's address, to be put in a table.
pub(crate) struct Hook {
    pub(crate) index: usize,
    pub(crate) handler: *const c_void,
}

// SAFETY: the pointer is to code, and never written through.
unsafe impl Sync for Hook {}

/// Defines handlers and the module's list of them. Several names may share one body:
/// `fn cuA | cuA_ptsz (x: u32) |real| { … }`; `real` calls the driver's own of the same name.
macro_rules! hooks {
    ($(fn $($name:ident)|+ ($($args:tt)*) |$real:ident| $body:block)*) => {
        $(hooks! { @each [$($name)+] ($($args)*) |$real| $body })*
        /// The handlers of this module.
        pub(crate) static HOOKS: &[crate::hook::Hook] = &[
            $($(crate::hook::Hook {
                index: crate::table::index::$name,
                handler: $name as *const core::ffi::c_void,
            }),+),*
        ];
    };
    (@each [$($name:ident)+] $args:tt |$real:ident| $body:block) => {
        $(hooks! { @one $name $args |$real| $body })+
    };
    (@one $name:ident ($($arg:ident: $ty:ty),* $(,)?) |$real:ident| $body:block) => {
        #[expect(non_snake_case, reason = "the driver's name")]
        unsafe extern "C" fn $name($($arg: $ty),*) -> muxflow_abi::cuda::CUresult {
            let found = crate::real::function(crate::table::index::$name);
            if found.is_null() {
                return muxflow_abi::cuda::result::CUDA_ERROR_NOT_FOUND;
            }
            #[allow(unused_variables, clippy::allow_attributes, reason = "not every body forwards")]
            let $real = |$($arg: $ty),*| -> muxflow_abi::cuda::CUresult {
                // SAFETY: the driver's function of this name has this signature (held to cuda.h by
                // the header test), and the arguments are the program's own or checked copies.
                unsafe {
                    let function = core::mem::transmute::<
                        *const core::ffi::c_void,
                        unsafe extern "C" fn($($ty),*) -> muxflow_abi::cuda::CUresult,
                    >(found);
                    function($($arg),*)
                }
            };
            $body
        }
    };
}

/// Calls another function of the real driver: `driver!(cuCtxGetDevice(device: *mut i32))`.
/// `CUDA_ERROR_NOT_FOUND` when the driver lacks it.
macro_rules! driver {
    ($name:ident($($value:expr => $ty:ty),* $(,)?)) => {{
        let found = crate::real::function(crate::table::index::$name);
        if found.is_null() {
            muxflow_abi::cuda::result::CUDA_ERROR_NOT_FOUND
        } else {
            // SAFETY: the driver's function of this name has this signature (held to cuda.h by the
            // header test); pointers given are to live variables of the caller.
            unsafe {
                let function = core::mem::transmute::<
                    *const core::ffi::c_void,
                    unsafe extern "C" fn($($ty),*) -> muxflow_abi::cuda::CUresult,
                >(found);
                function($($value),*)
            }
        }
    }};
}

/// What a pointer of the program points to; nothing for null.
pub(crate) fn peek<T: Copy>(pointer: *const T) -> Option<T> {
    if pointer.is_null() {
        return None;
    }
    // SAFETY: the program gave it to a driver function that reads the same.
    Some(unsafe { pointer.read_unaligned() })
}

/// Writes where the program asked for it; nowhere for null.
pub(crate) fn poke<T: Copy>(pointer: *mut T, value: T) {
    if !pointer.is_null() {
        // SAFETY: the program gave it to a driver function that writes the same.
        unsafe { pointer.write_unaligned(value) };
    }
}

/// All handlers, by module.
pub(crate) static ALL: [&[Hook]; 13] = [
    crate::array::HOOKS,
    crate::capture::HOOKS,
    crate::context::HOOKS,
    crate::graph::HOOKS,
    crate::import::HOOKS,
    crate::info::HOOKS,
    crate::launch::HOOKS,
    crate::launch::PLAIN,
    crate::lookup::HOOKS,
    crate::memory::HOOKS,
    crate::module::HOOKS,
    crate::pool::HOOKS,
    crate::virtual_memory::HOOKS,
];

/// The handler of a driver function, if it is one that we handle.
pub(crate) fn handler(index: usize) -> Option<*const c_void> {
    ALL.iter().flat_map(|hooks| hooks.iter()).find(|hook| hook.index == index).map(|h| h.handler)
}

#[cfg(test)]
mod tests {
    use muxflow_abi::driver::DRIVER;
    use muxflow_abi::handled::HANDLED;

    #[test]
    fn what_is_said_to_be_handled_is_handled() {
        let hooks = super::ALL.iter().flat_map(|hooks| hooks.iter());
        let mut symbols: Vec<&str> = hooks.map(|hook| DRIVER[hook.index].symbol).collect();
        symbols.sort_unstable();
        assert_eq!(symbols, HANDLED);
    }
}
