"""Problems and graders, one family behind `arbor.tasks.base.Task`; the import loads none."""
