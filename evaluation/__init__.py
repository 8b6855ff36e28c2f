"""What was made, looked at: summaries of commands, views into stores."""
