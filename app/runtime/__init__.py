"""The worker's side: the only importers of torch, diffusers, transformers. Imports schema, events and errors only."""
