"""Any decoder that Transformers has, by Transformers' own code: its parts replaced by layers, its attention by ours."""
