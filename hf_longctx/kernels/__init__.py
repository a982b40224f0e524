"""Math on one process: the naive reference, the fast kernels and the merge of partials."""
