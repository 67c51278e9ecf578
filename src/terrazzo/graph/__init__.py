"""From nn.Module to Graph, and the table of operator rules."""
