"""From a run folder to a terminal, a page and a trace; reads records only, never torch."""
