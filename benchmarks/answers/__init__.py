"""Do a GPU and the CPU oracle give the same tokens? Real weights, all dtypes, alone and in company."""
