"""What was made, looked at and judged: views into stores and LSPs, tasks, comparisons, studies."""
