"""The data loader on a worker."""

from twinkle.dataloader import DataLoader
from twinkle.infra import remote_class, remote_function


@remote_class(execute="first")
class RemoteLoader(DataLoader):
    @remote_function()
    def __iter__(self):
        return super().__iter__()

    @remote_function()
    def __next__(self):
        return super().__next__()

    @remote_function()
    def __len__(self):
        return super().__len__()

    @remote_function(lazy_collect=False)
    def get_state(self):
        return super().get_state()
