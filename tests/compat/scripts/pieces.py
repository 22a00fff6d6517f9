"""A CTC recogniser of SentencePiece tokens, in the manner of SpeechBrain's CommonVoice recipe."""

import sys

import torch
from hyperpyyaml import load_hyperpyyaml
from speechbrain.tokenizers.SentencePiece import SentencePiece
from speechbrain.utils.distributed import if_main_process, run_on_main

import sbkit as sb


class ASR(sb.core.Brain):
    def compute_forward(self, batch, stage):
        batch = batch.to(self.device)
        wavs, wav_lens = batch.sig
        if stage == sb.Stage.TRAIN and hasattr(self.hparams, "wav_augment"):
            wavs, wav_lens = self.hparams.wav_augment(wavs, wav_lens)
        feats = self.hparams.compute_features(wavs)
        feats = self.modules.normalize(feats, wav_lens, epoch=self.hparams.epoch_counter.current)
        x = self.modules.enc(feats)
        logits = self.modules.ctc_lin(x)
        p_ctc = self.hparams.log_softmax(logits)
        p_tokens = None
        if stage != sb.Stage.TRAIN:
            p_tokens = sb.decoders.ctc_greedy_decode(p_ctc, wav_lens, blank_id=self.hparams.blank_index)
        return p_ctc, wav_lens, p_tokens

    def compute_objectives(self, predictions, batch, stage):
        p_ctc, wav_lens, predicted_tokens = predictions
        ids = batch.id
        tokens, tokens_lens = batch.tokens
        loss = self.hparams.ctc_cost(p_ctc, tokens, wav_lens, tokens_lens)
        if stage != sb.Stage.TRAIN:
            predicted_words = self.tokenizer(predicted_tokens, task="decode_from_list")
            target_words = self.tokenizer(sb.utils.data_utils.undo_padding(tokens, tokens_lens),
                                          task="decode_from_list")
            self.wer_metric.append(ids, predicted_words, target_words)
        return loss

    def on_stage_start(self, stage, epoch):
        if stage != sb.Stage.TRAIN:
            self.wer_metric = self.hparams.error_rate_computer()

    def on_stage_end(self, stage, stage_loss, epoch):
        if stage == sb.Stage.TRAIN:
            self.train_loss = stage_loss
        elif stage == sb.Stage.VALID:
            wer = self.wer_metric.summarize("error_rate")
            self.hparams.train_logger.log_stats({"epoch": epoch}, {"loss": self.train_loss},
                                                {"loss": stage_loss, "WER": wer})
            self.checkpointer.save_and_keep_only(meta={"WER": wer}, min_keys=["WER"])
        else:
            self.hparams.train_logger.log_stats({"Epoch loaded": self.hparams.epoch_counter.current},
                                                test_stats={"loss": stage_loss})
            if if_main_process():
                with open(self.hparams.test_wer_file, "w", encoding="utf-8") as file:
                    self.wer_metric.write_stats(file)


def prepare(save_folder):
    """Nothing has to be prepared; each start says so."""
    print("prepared", save_folder)


def dataio_prepare(hparams, tokenizer):
    datasets = [sb.dataio.dataset.DynamicItemDataset.from_csv(csv_path=hparams[f"{split}_csv"])
                for split in ("train", "valid", "test")]
    datasets[0] = datasets[0].filtered_sorted(sort_key="duration")

    @sb.utils.data_pipeline.takes("wav")
    @sb.utils.data_pipeline.provides("sig")
    def audio_pipeline(wav):
        return sb.dataio.dataio.read_audio(wav)

    @sb.utils.data_pipeline.takes("wrd")
    @sb.utils.data_pipeline.provides("tokens_list", "tokens_bos", "tokens_eos", "tokens")
    def text_pipeline(wrd):
        tokens_list = tokenizer.sp.encode_as_ids(wrd)
        yield tokens_list
        yield torch.LongTensor([hparams["bos_index"], *tokens_list])
        yield torch.LongTensor([*tokens_list, hparams["eos_index"]])
        yield torch.LongTensor(tokens_list)

    sb.dataio.dataset.add_dynamic_item(datasets, audio_pipeline)
    sb.dataio.dataset.add_dynamic_item(datasets, text_pipeline)
    sb.dataio.dataset.set_output_keys(datasets, ["id", "sig", "tokens_bos", "tokens_eos", "tokens"])
    return datasets


if __name__ == "__main__":
    hparams_file, run_opts, overrides = sb.parse_arguments(sys.argv[1:])
    with open(hparams_file, encoding="utf-8") as fin:
        hparams = load_hyperpyyaml(fin, overrides)
    sb.create_experiment_directory(experiment_directory=hparams["output_folder"], hyperparams_to_save=hparams_file,
                                   overrides=overrides)
    run_on_main(prepare, kwargs={"save_folder": hparams["save_folder"]})
    tokenizer = SentencePiece(model_dir=hparams["save_folder"], vocab_size=hparams["output_neurons"],
                              annotation_train=hparams["train_csv"], annotation_read="wrd",
                              model_type=hparams["token_type"], bos_id=hparams["bos_index"],
                              eos_id=hparams["eos_index"])
    train_data, valid_data, test_data = dataio_prepare(hparams, tokenizer)
    asr_brain = ASR(modules=hparams["modules"], hparams=hparams, run_opts=run_opts, opt_class=hparams["opt_class"],
                    checkpointer=hparams["checkpointer"])
    asr_brain.tokenizer = tokenizer
    asr_brain.fit(asr_brain.hparams.epoch_counter, train_data, valid_data,
                  train_loader_kwargs=hparams["dataloader_options"],
                  valid_loader_kwargs=hparams["test_dataloader_options"])
    asr_brain.evaluate(test_data, min_key="WER", test_loader_kwargs=hparams["test_dataloader_options"])
