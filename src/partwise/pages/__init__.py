"""Something a person looks at: the report of runs, and the page of a run that is going on. From files alone."""
