//! The commands of the control program, version 2.

use super::daemon::{Daemon, command_of, device_facts, device_processes, uuid_text};
use super::limits::{Limits, device_key, parse_size};

impl Daemon {
    /// Does a command; says whether it worked, and what to print.
    pub(super) fn command(&mut self, line: &str) -> (bool, String) {
        let words: Vec<&str> = line.split_whitespace().collect();
        let Some(name) = words.first() else { return (true, String::new()) };
        let result = if self.options.protocol == 3 {
            self.module_verb(&words)
        } else {
            self.legacy(name, &words)
        };
        match result {
            Ok(text) => (true, text),
            Err(text) => (false, text + "\n"),
        }
    }

    fn legacy(&mut self, name: &str, words: &[&str]) -> Result<String, String> {
        match name {
            "get_server_list" => Ok(lines(self.servers.keys())),
            "get_server_status" => self.server_status(words),
            "get_client_list" => self.client_list(words),
            "get_device_client_list" => self.device_clients(words),
            "ps" => Ok(self.table()),
            "terminate_client" => self.terminate(words),
            "start_server" => self.start(words),
            "shutdown_server" => self.shutdown(words),
            "device_query" => Ok(self.devices()),
            "lspart" => Ok(self.devices() + &self.partition_lines()),
            "sm_partition" => self.partition_command(words),
            _ => self.limit_command(words),
        }
    }

    fn server(&self, words: &[&str], at: usize) -> Result<u32, String> {
        let word = words.get(at).ok_or("Server PID is missing")?;
        let pid = word.parse().map_err(|_| format!("{word} is not a PID"))?;
        if self.servers.contains_key(&pid) {
            Ok(pid)
        } else {
            Err(format!("Server {pid} not found"))
        }
    }

    fn server_status(&self, words: &[&str]) -> Result<String, String> {
        let pid = self.server(words, 1)?;
        Ok(format!("{}\n", self.servers[&pid].status.word()))
    }

    fn client_list(&self, words: &[&str]) -> Result<String, String> {
        let pid = self.server(words, 1)?;
        Ok(lines(self.clients_of(pid).iter()))
    }

    /// Each device, and below it the clients on it; of one server when it is named.
    fn device_clients(&self, words: &[&str]) -> Result<String, String> {
        let server = if words.len() > 1 { Some(self.server(words, 1)?) } else { None };
        let mut text = String::new();
        for gpu in &self.options.gpus {
            let Some(facts) = device_facts(&self.options.node, *gpu) else { continue };
            text += &format!("{}\n", uuid_text(&facts));
            let here = self.clients_on(*gpu);
            let here = here.iter().filter(|(_, of)| server.is_none_or(|server| server == *of));
            text += &lines(here.map(|(pid, _)| pid));
        }
        Ok(text)
    }

    /// Clients of this daemon with a context on a GPU, and their servers.
    pub(super) fn clients_on(&self, gpu: usize) -> Vec<(i32, u32)> {
        let all = device_processes(&self.options.node, gpu);
        let ours = all.iter().filter(|p| self.servers.contains_key(&p.server_pid));
        ours.map(|p| (p.pid.cast_signed(), p.server_pid)).collect()
    }

    fn table(&self) -> String {
        let mut text =
            "PID       ID    SERVER    DEVICE             NAMESPACE    COMMAND\n".to_owned();
        for gpu in &self.options.gpus {
            let Some(facts) = device_facts(&self.options.node, *gpu) else { continue };
            let device = &uuid_text(&facts)[..12];
            for (pid, server) in self.clients_on(*gpu) {
                let name = command_of(pid);
                text += &format!("{pid:<9} 0     {server:<9} {device:<18} 0            {name}\n");
            }
        }
        text
    }

    fn devices(&self) -> String {
        let mut text = "GPU\tUUID\n".to_owned();
        for gpu in &self.options.gpus {
            if let Some(facts) = device_facts(&self.options.node, *gpu) {
                text += &format!("{gpu}\t{}\n", uuid_text(&facts));
            }
        }
        text
    }

    fn terminate(&mut self, words: &[&str]) -> Result<String, String> {
        let server = self.server(words, 1)?;
        let word = words.get(2).ok_or("Client PID is missing")?;
        let client: i32 = word.parse().map_err(|_| format!("{word} is not a PID"))?;
        if !self.clients_of(server).contains(&client) {
            return Err(format!("Client {client} not found"));
        }
        self.throw_out(server, client);
        Ok(String::new())
    }

    fn start(&mut self, words: &[&str]) -> Result<String, String> {
        let uid = match words.get(1..3) {
            Some(["-uid", uid]) => uid.parse().map_err(|_| format!("{uid} is not a user ID"))?,
            _ => return Err("start_server -uid USER".to_owned()),
        };
        self.server_of_user(uid)
    }

    pub(super) fn server_of_user(&mut self, uid: u32) -> Result<String, String> {
        let all = self.options.multi_user;
        match self.servers.iter().find(|(_, s)| all || s.uid == uid) {
            Some((pid, server)) if server.closing => {
                return Err(format!("Server {pid} is shutting down"));
            }
            Some((pid, _)) => return Ok(format!("{pid}\n")),
            None => {}
        }
        if let Some((pid, server)) =
            self.servers.iter().find(|(pid, _)| !self.clients_of(**pid).is_empty())
        {
            return Err(format!("Server {pid} has clients of user {}", server.uid));
        }
        let earlier: Vec<u32> = self.waiting().into_iter().map(|(_, uid)| uid).collect();
        let started = self.server_for(uid, &earlier);
        started.map(|pid| format!("{pid}\n")).ok_or("cannot start it".to_owned())
    }

    fn shutdown(&mut self, words: &[&str]) -> Result<String, String> {
        let pid = self.server(words, 1)?;
        if words.contains(&"-f") {
            self.stop_server(pid);
        } else if let Some(server) = self.servers.get_mut(&pid) {
            server.closing = true;
        }
        Ok(String::new())
    }

    /// Limits: of the defaults for servers to come, or of one server for clients to come.
    fn limit_command(&mut self, words: &[&str]) -> Result<String, String> {
        let unknown = || format!("Unknown command: {}", words.join(" "));
        let name = words[0];
        let (verb, rest) = name.split_once('_').ok_or_else(unknown)?;
        let (what, of_default) = match rest.strip_prefix("default_") {
            Some(what) => (what, true),
            None => (rest, false),
        };
        let (limits, arguments): (&mut Limits, &[&str]) = if of_default {
            (&mut self.defaults, &words[1..])
        } else {
            let pid = self.server(words, 1)?;
            let server = self.servers.get_mut(&pid).ok_or_else(unknown)?;
            (&mut server.limits, &words[2..])
        };
        match (verb, what) {
            ("get", "active_thread_percentage") => Ok(format!("{:.1}\n", limits.thread_pct)),
            ("set", "active_thread_percentage") => {
                let word = arguments.first().ok_or("a percentage is missing")?;
                let pct: f64 = word.parse().map_err(|_| format!("{word} is not a percentage"))?;
                if !(pct > 0.0 && pct <= 100.0) {
                    return Err(format!("{word} is not between 0 and 100"));
                }
                limits.thread_pct = pct;
                Ok(format!("{pct:.1}\n"))
            }
            ("get", "device_pinned_mem_limit") => {
                let device = arguments.first().ok_or("a device is missing")?;
                let found = limits.memory.get(&device_key(device));
                Ok(found.map_or("unlimited\n".to_owned(), |b| format!("{}M\n", b >> 20)))
            }
            ("set", "device_pinned_mem_limit") => {
                let [device, size, ..] = arguments else {
                    return Err("a device and a size are needed".to_owned());
                };
                let bytes = parse_size(size).ok_or(format!("{size} is not a size"))?;
                limits.memory.insert(device_key(device), bytes);
                Ok(String::new())
            }
            ("get", "client_priority") => Ok(format!("{}\n", limits.priority)),
            ("set", "client_priority") => {
                let word = arguments.first().ok_or("a priority is missing")?;
                limits.priority = word.parse().map_err(|_| format!("{word} is not a priority"))?;
                Ok(String::new())
            }
            _ => Err(unknown()),
        }
    }
}

fn lines<T: ToString>(items: impl Iterator<Item = T>) -> String {
    items.map(|item| item.to_string() + "\n").collect()
}
