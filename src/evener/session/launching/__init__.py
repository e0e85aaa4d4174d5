"""Where the processes of a job come from, one for each device, and who looks after them."""
