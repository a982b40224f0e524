"""Documents -> the batches of one group of ranks: packing, targets, scan, sampler, collator."""
