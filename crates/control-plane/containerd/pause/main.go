// Command pause does nothing until it is told to end: the first process of a pod, which holds its
// namespaces. Called as the first process of the tests' own namespace, it reaps whoever is left to it
// and ends with its standard input, and the kernel ends all others with it.
package main

import (
	"io"
	"os"
	"os/signal"
	"syscall"
)

// reap takes the exit states of processes whose parents are gone.
func reap(died <-chan os.Signal) {
	for range died {
		for {
			pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil)
			if pid <= 0 || err != nil {
				break
			}
		}
	}
}

func main() {
	died := make(chan os.Signal, 1)
	signal.Notify(died, syscall.SIGCHLD)
	go reap(died)
	if os.Getenv("EXIT_WITH_STDIN") == "1" {
		_, _ = io.Copy(io.Discard, os.Stdin)
		return
	}
	told := make(chan os.Signal, 1)
	signal.Notify(told, syscall.SIGTERM, syscall.SIGINT)
	<-told
}
