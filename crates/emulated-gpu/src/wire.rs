//! What goes over the device's socket: small fixed messages, a tail of bytes where one is needed,
//! and descriptors of shared memory.
//!
//! The socket keeps message boundaries. A client's connection is also how the device learns that
//! it died: everything the client held is given back when it hangs up.

use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

/// Longest message with its tail.
pub const LONGEST: usize = 32 * 1024;

/// What a message asks for or answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Kind {
    /// The answer to any request.
    Reply = 0,
    /// A process that will run work: [role, mps server pid, cap in thousandths of SMs, memory
    /// limit, priority, flags]; brings its heap file; gets [client id], the facts, three files.
    Hello = 1,
    /// [bytes, 1 when managed] more memory.
    Allocate = 2,
    /// `[bytes]` less memory.
    Free = 3,
    /// Gets [free, total, own use].
    MemoryInfo = 4,
    /// [+1 or -1] contexts.
    Context = 5,
    /// `[client id]` whose heap file is wanted.
    OpenHeap = 6,
    /// Gets a [`crate::facts::Stats`].
    Stats = 7,
    /// Gets the processes, as [`crate::facts::Process`] one after the other.
    Processes = 8,
    /// `[mask of events]` to be sent from now on as they happen.
    Subscribe = 9,
    /// Sent by the device: [kind, data, time].
    Event = 10,
    /// A fault to inject: [fault, argument, error of a client that speaks of itself, pid, delay in ms].
    Inject = 11,
    /// An MPS server speaks: the device tells it about faults of its clients.
    Server = 12,
    /// MPS server to device: [client pid] must be thrown out.
    Terminate = 13,
    /// `[what, value]`: settings such as power limit or compute mode, or what an MPS server orders
    /// ([`crate::fault::server_order`]).
    Set = 14,
    /// Gets a short history of utilisation: [which counter].
    Samples = 15,
    /// `[pid]` of a parent whose connection a forked child must not use: unused by the device.
    Ping = 16,
    /// `[client id]`: gets `[1]` when that client lives and no fault has struck it.
    Alive = 17,
}

/// The fixed part of every message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Message {
    /// A [`Kind`].
    pub kind: u32,
    /// 0, or a CUDA error in a reply.
    pub status: u32,
    /// What the kind says.
    pub values: [u64; 7],
}

impl Message {
    /// A message of a kind with its values.
    pub fn new(kind: Kind, values: &[u64]) -> Message {
        let mut message = Message { kind: kind as u32, status: 0, values: [0; 7] };
        message.values[..values.len().min(7)].copy_from_slice(&values[..values.len().min(7)]);
        message
    }

    /// A reply.
    pub fn reply(status: u32, values: &[u64]) -> Message {
        Message { status, ..Message::new(Kind::Reply, values) }
    }
}

/// Structures without padding or pointers that may travel as bytes.
///
/// # Safety
/// Implementors are `repr(C)`, have no padding, and are valid for any bits.
pub unsafe trait Plain: Copy {
    /// All bits zero.
    fn zeroed() -> Self {
        // SAFETY: the trait promises that any bits are valid.
        unsafe { std::mem::zeroed() }
    }

    /// Its bytes.
    fn bytes(&self) -> &[u8] {
        // SAFETY: no padding, so every byte is initialised; lifetime is that of `self`.
        unsafe { std::slice::from_raw_parts(std::ptr::from_ref(self).cast(), size_of::<Self>()) }
    }

    /// From bytes; none when there are too few.
    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        // SAFETY: long enough, any bits are valid, and the read does not need alignment.
        (bytes.len() >= size_of::<Self>())
            .then(|| unsafe { std::ptr::read_unaligned(bytes.as_ptr().cast()) })
    }
}
// SAFETY: two u32 and seven u64, no padding.
unsafe impl Plain for Message {}

/// One end of a connection, the process that made it, and whether it waits for a full socket.
#[derive(Debug)]
pub struct Socket(OwnedFd, u32, Patience);

/// Whether a sender waits until the other end has read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Patience {
    /// A client waits for its device.
    Waits,
    /// A device serves many and waits for none.
    Never,
}

/// What was received.
#[derive(Debug)]
pub struct Received {
    /// The fixed part.
    pub message: Message,
    /// The tail.
    pub tail: Vec<u8>,
    /// Descriptors that came along.
    pub fds: Vec<OwnedFd>,
}

fn address(path: &Path) -> io::Result<(libc::sockaddr_un, libc::socklen_t)> {
    // SAFETY: all-zero is a valid socket address.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    let bytes = path.as_os_str().as_bytes();
    if bytes.len() >= address.sun_path.len() {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("{} is too long for a socket: use a shorter directory", path.display()),
        ));
    }
    for (to, from) in address.sun_path.iter_mut().zip(bytes) {
        *to = from.cast_signed();
    }
    Ok((address, size_of::<libc::sockaddr_un>() as libc::socklen_t))
}

fn new_socket(flags: i32) -> io::Result<OwnedFd> {
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC | flags;
    // SAFETY: plain call.
    let fd = unsafe { libc::socket(libc::AF_UNIX, kind, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just made and belongs to nobody else.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// A socket that takes connections at `path`; an old file there is removed.
pub fn listen(path: &Path) -> io::Result<OwnedFd> {
    let fd = new_socket(libc::SOCK_NONBLOCK)?;
    if path.exists() {
        std::fs::remove_file(path)?;
    }
    let (address, length) = address(path)?;
    // SAFETY: the address is valid and as long as said.
    let bound = unsafe { libc::bind(fd.as_raw_fd(), (&raw const address).cast(), length) };
    if bound == 0 {
        use std::os::unix::fs::PermissionsExt;
        // As the nodes of a real GPU: who may use it is not decided here.
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o666))?;
    }
    // SAFETY: plain call on an owned descriptor.
    if bound != 0 || unsafe { libc::listen(fd.as_raw_fd(), 256) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(fd)
}

/// Takes one connection; none when nobody waits.
pub fn accept(listener: BorrowedFd<'_>) -> Option<Socket> {
    let flags = libc::SOCK_CLOEXEC;
    // SAFETY: no address is asked for.
    let fd = unsafe {
        libc::accept4(listener.as_raw_fd(), std::ptr::null_mut(), std::ptr::null_mut(), flags)
    };
    // SAFETY: the descriptor was just made and belongs to nobody else.
    (fd >= 0)
        .then(|| Socket(unsafe { OwnedFd::from_raw_fd(fd) }, std::process::id(), Patience::Never))
}

impl Socket {
    /// Connects to who listens at `path`.
    pub fn connect(path: &Path) -> io::Result<Socket> {
        let fd = new_socket(0)?;
        let (address, length) = address(path)?;
        // SAFETY: the address is valid and as long as said.
        if unsafe { libc::connect(fd.as_raw_fd(), (&raw const address).cast(), length) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Socket(fd, std::process::id(), Patience::Waits))
    }

    /// The descriptor, for polling.
    pub fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// Process, user of the other end.
    pub fn peer(&self) -> (i32, u32) {
        let mut credentials = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
        let mut length = size_of::<libc::ucred>() as libc::socklen_t;
        // SAFETY: place and length belong together.
        unsafe {
            libc::getsockopt(
                self.fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERCRED,
                (&raw mut credentials).cast(),
                &raw mut length,
            );
        }
        (credentials.pid, credentials.uid)
    }

    /// A read that waits longer than this fails.
    pub fn set_timeout(&self, timeout: Duration) {
        let value = libc::timeval {
            tv_sec: libc::time_t::try_from(timeout.as_secs()).unwrap_or(libc::time_t::MAX),
            tv_usec: i64::from(timeout.subsec_micros()),
        };
        // SAFETY: place and length belong together.
        unsafe {
            libc::setsockopt(
                self.fd(),
                libc::SOL_SOCKET,
                libc::SO_RCVTIMEO,
                (&raw const value).cast(),
                size_of::<libc::timeval>() as libc::socklen_t,
            );
        }
    }

    /// Sends a message, its tail and descriptors; never raises SIGPIPE. The end that was connected to
    /// never waits for a full socket: that is an error that would block.
    pub fn send(&self, message: &Message, tail: &[u8], fds: &[RawFd]) -> io::Result<()> {
        let mut parts = [
            libc::iovec {
                iov_base: message.bytes().as_ptr().cast_mut().cast(),
                iov_len: size_of::<Message>(),
            },
            libc::iovec { iov_base: tail.as_ptr().cast_mut().cast(), iov_len: tail.len() },
        ];
        let mut control = [0_u64; 16];
        // SAFETY: all-zero is a valid message header.
        let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
        header.msg_iov = parts.as_mut_ptr();
        header.msg_iovlen = 2;
        if !fds.is_empty() {
            let bytes = size_of_val(fds) as u32;
            header.msg_control = control.as_mut_ptr().cast();
            // SAFETY: only computes a size.
            header.msg_controllen = unsafe { libc::CMSG_SPACE(bytes) } as usize;
            // SAFETY: the control buffer is large enough for the descriptors of any message here
            // (at most eight) and aligned.
            unsafe {
                let c = libc::CMSG_FIRSTHDR(&raw const header);
                (*c).cmsg_level = libc::SOL_SOCKET;
                (*c).cmsg_type = libc::SCM_RIGHTS;
                (*c).cmsg_len = libc::CMSG_LEN(bytes) as usize;
                std::ptr::copy_nonoverlapping(
                    fds.as_ptr().cast::<u8>(),
                    libc::CMSG_DATA(c),
                    bytes as usize,
                );
            }
        }
        let flags = match self.2 {
            Patience::Waits => libc::MSG_NOSIGNAL,
            Patience::Never => libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT,
        };
        loop {
            // SAFETY: the header and everything it points to live until the call returns.
            let sent = unsafe { libc::sendmsg(self.fd(), &raw const header, flags) };
            if sent >= 0 {
                return Ok(());
            }
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
    }

    /// Receives one message; `None` when the other end hung up.
    pub fn receive(&self) -> io::Result<Option<Received>> {
        let mut buffer = vec![0_u8; LONGEST];
        let mut control = [0_u64; 16];
        let mut part = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
        // SAFETY: all-zero is a valid message header.
        let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
        header.msg_iov = &raw mut part;
        header.msg_iovlen = 1;
        header.msg_control = control.as_mut_ptr().cast();
        header.msg_controllen = size_of_val(&control);
        let got = loop {
            // SAFETY: the header and everything it points to live until the call returns.
            let got = unsafe { libc::recvmsg(self.fd(), &raw mut header, libc::MSG_CMSG_CLOEXEC) };
            if got >= 0 {
                break got.cast_unsigned();
            }
            let error = io::Error::last_os_error();
            match error.kind() {
                io::ErrorKind::Interrupted => {}
                io::ErrorKind::ConnectionReset => return Ok(None),
                _ => return Err(error),
            }
        };
        let fds = descriptors(&header);
        buffer.truncate(got);
        let Some(message) = Message::from_bytes(&buffer) else { return Ok(None) };
        Ok(Some(Received { message, tail: buffer.split_off(size_of::<Message>()), fds }))
    }

    /// Whether this process made the connection, or inherited it over a fork.
    pub fn belongs_here(&self) -> bool {
        self.1 == std::process::id()
    }

    /// Asks and waits for the answer.
    pub fn ask(&self, message: &Message, tail: &[u8], fds: &[RawFd]) -> io::Result<Received> {
        self.send(message, tail, fds)?;
        self.receive()?.ok_or_else(|| io::ErrorKind::ConnectionReset.into())
    }
}

fn descriptors(header: &libc::msghdr) -> Vec<OwnedFd> {
    let mut fds = Vec::new();
    // SAFETY: the kernel filled the control buffer; the macros walk only what it filled, and each
    // descriptor in it is new and ours.
    unsafe {
        let mut c = libc::CMSG_FIRSTHDR(std::ptr::from_ref(header));
        while !c.is_null() {
            if (*c).cmsg_level == libc::SOL_SOCKET && (*c).cmsg_type == libc::SCM_RIGHTS {
                let bytes = (*c).cmsg_len - libc::CMSG_LEN(0) as usize;
                for i in 0..bytes / size_of::<RawFd>() {
                    let fd = libc::CMSG_DATA(c).cast::<RawFd>().add(i).read_unaligned();
                    fds.push(OwnedFd::from_raw_fd(fd));
                }
            }
            c = libc::CMSG_NXTHDR(std::ptr::from_ref(header), c);
        }
    }
    fds
}

impl std::os::fd::AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn the_end_that_serves_never_waits_for_one_that_does_not_read() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("socket");
        let listener = listen(&path).expect("it listens");
        let _idle = Socket::connect(&path).expect("it connects");
        let served = accept(listener.as_fd()).expect("somebody waits");
        let message = Message::new(Kind::Event, &[1, 2, 3]);
        let refused = (0..1_000_000).find_map(|_| served.send(&message, &[], &[]).err());
        assert_eq!(refused.map(|error| error.kind()), Some(io::ErrorKind::WouldBlock));
    }
}
