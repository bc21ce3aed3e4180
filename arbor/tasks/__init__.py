"""Problems and graders: one family behind `arbor.tasks.base.Task`; importing this loads none of them."""
