"""Many runs instead of one large one: what a sweep varies, and the queue that fills the hosts with its runs."""
