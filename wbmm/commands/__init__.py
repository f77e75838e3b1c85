"""The subcommands of `wbmm` that describe models and the machine; each has `add_arguments(parser)` and `run(args)`."""
