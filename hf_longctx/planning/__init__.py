"""Who holds, computes and moves what: pure Python and NumPy, no tensor, process group or clock."""
