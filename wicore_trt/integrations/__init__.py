"""Other projects' programs that stand between clients and servers of ours."""
