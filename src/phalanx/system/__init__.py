"""What Phalanx asks of the machine: kernel, shared page, file names, interpreters."""
