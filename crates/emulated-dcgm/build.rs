//! Gives the library its real name.

fn main() {
    for flag in ["-Wl,-Bsymbolic", "-Wl,-soname,libdcgm.so.4"] {
        println!("cargo:rustc-cdylib-link-arg={flag}");
    }
}
